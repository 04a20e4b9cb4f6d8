"""The trace passes, one per file, all with the signature ``pass_(trace, ...) -> trace``; each records its provenance.

``thunder_fsdp_sched.pipeline`` has the table of passes, in the order in which they run.

Each docstring shows lines of a trace before and after the pass. Unless it names another model, they come from three
blocks of ``Linear(64, 64, bias=False)`` and ``relu`` on two ranks, with the default options. ``...`` marks omissions.
"""
