"""How the page looks: one style sheet, for light and dark, wide and narrow."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfbf9; --ink: #1d2129; --soft: #5c6470; --line: #d9dce1; --track: #e9ebee; --fill: #2f6fb3;
  --drafted: #bfe3c4; --bonus: #f6d9a8; --prompt: #d5dae2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #15181d; --ink: #e4e7ec; --soft: #9aa3b0; --line: #343a44; --track: #272c34; --fill: #6aa7e8;
    --drafted: #1f5a35; --bonus: #6b4a12; --prompt: #3b434f;
  }
}
body { margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; }
h3 { font-size: .95rem; margin: 1rem 0 .35rem; overflow-wrap: anywhere; }
p { margin: .3rem 0; max-width: 60rem; }
.facts, .note { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; }
thead th { color: var(--soft); font-weight: 500; }
th[scope=row], thead th:first-child { text-align: left; padding-left: 0; }
.bars { display: grid; gap: .3rem; max-width: 44rem; }
.bar { display: grid; grid-template-columns: minmax(1.5rem, 12rem) 1fr 4rem; gap: .6rem; align-items: center; font-size: .9rem; }
.field .bar { grid-template-columns: 1rem 1fr 3.2rem; }
.name { overflow-wrap: anywhere; }
.value { text-align: right; font-variant-numeric: tabular-nums; }
.track { background: var(--track); height: .85rem; border-radius: .2rem; overflow: hidden; }
.fill { display: block; height: 100%; background: var(--fill); }
.fields { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 1rem 2rem; }
.key { font-size: .9rem; color: var(--soft); }
.token { border-radius: .15rem; padding: .05rem 0; color: var(--ink); }
.key .token { padding: .05rem .35rem; }
.step { border-left: 2px solid var(--line); }
.drafted { background: var(--drafted); }
.bonus { background: var(--bonus); }
.prompt { background: var(--prompt); }
.answer { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.75; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; font-size: .9rem; }
dt { font-family: ui-monospace, monospace; }
dd { margin: 0; color: var(--soft); }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; } }
"""
