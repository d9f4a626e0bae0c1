"""`python -m disttrain_agent [COMMAND …]`; COMMAND is what a rank runs, the trainer by default."""

import sys

from disttrain_agent.main import main

sys.exit(main(sys.argv[1:]))
