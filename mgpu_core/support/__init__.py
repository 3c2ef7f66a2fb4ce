"""Files, warnings, extras and pages: nothing of it has to do with devices, and core and tools both need it."""
