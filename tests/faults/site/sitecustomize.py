"""Install the hook in each process that a test starts."""

from faults.hook import install

install()
