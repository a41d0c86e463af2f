"""The only code that touches /sys, /proc, device files and sockets of the system. It knows no metrics."""
