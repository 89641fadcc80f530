"""What a model says of itself, as data that draft heads learn from."""
