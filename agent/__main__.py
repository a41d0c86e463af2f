"""`python -m agent` is `hpcwatch`."""

import sys

from agent.cli import main

sys.exit(main())
