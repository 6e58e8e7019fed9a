"""``python -m relax_disc`` is the command ``relax-disc``."""

from relax_disc.cli import main

main()
