"""The vocabulary of traces, and what is read off them."""
