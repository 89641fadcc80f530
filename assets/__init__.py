"""Weights that this project trained, shipped as `oval_adapters.assets`; each folder says by what command and data."""
