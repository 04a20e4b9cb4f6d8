"""The simulated step: clusters, costs, timelines, and the choices that depend on them."""
