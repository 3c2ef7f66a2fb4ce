"""Modules and nests: the parts of a replica, and the arguments and outputs of a forward."""
