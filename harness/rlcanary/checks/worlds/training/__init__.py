"""States, updates and the small trainer that makes them."""
