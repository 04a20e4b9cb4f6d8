"""The demo: train a small GPT unsharded, with Thunder's fsdp and with this package, and compare the runs."""
