"""Images of attached models: their features, their pages, and what a cache holds of them."""
