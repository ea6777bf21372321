"""How long tests wait for what has to come, however busy the machine is."""

import os

WAIT_S = float(os.environ.get("KVSTORE_TESTS_WAIT_S", "600"))
