"""The simulated step: machines, costs, time lines, and the choices that rest on them."""
