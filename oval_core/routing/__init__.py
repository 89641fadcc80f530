"""Routers: what scores pages before a forward, and the policies that read by these scores."""
