"""NVML, the driver's own library, through its Python binding: the only importer of `pynvml`.

`library` finds the library without loading it, `calls` names what can be asked, `session` loads and asks. A call may
never return and may crash the process: whoever opens a session runs in a process of its own.
"""
