"""Training of draft heads on a model's own answers: data, loss, accuracy, loop. It never sees the model itself."""
