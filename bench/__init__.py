"""batchline measured against what people would use instead, on one machine in one run: ``python -m bench``."""

import sys
from pathlib import Path

# The servers that the tests start are started here in the same way.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
