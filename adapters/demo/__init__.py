"""`oval demo`: a picture, an answer, what was read for it, and the figures, on the embedded models."""
