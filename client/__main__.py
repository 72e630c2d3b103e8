"""`python -m client` is the command `chairlift`, also where no script has been installed."""

import sys

from client.cli import main

sys.exit(main())
