"""Training of what this project ships or a user makes: routers, sizing heads."""
