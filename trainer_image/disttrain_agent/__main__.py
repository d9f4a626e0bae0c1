"""`python -m disttrain_agent [COMMAND …]`; COMMAND is what a rank runs, the trainer by default."""

import os
import sys

from disttrain_agent.zygote_process import start_before_the_agent

zygote = start_before_the_agent(os.environ, sys.argv[1:])

from disttrain_agent.main import main  # noqa: E402 - it takes a third of a second

sys.exit(main(sys.argv[1:], zygote=zygote))
