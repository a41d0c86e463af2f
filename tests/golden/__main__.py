"""Write the goldens anew: `python -m tests.golden`. What they changed, `git diff tests/golden` shows."""

import logging

from tests.golden.goldens import write

if __name__ == "__main__":
    logging.disable()  # what fails in a story is in the goldens
    write()
