"""Makes the helper modules of this folder (hybrid_*.py) importable by its tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("hybrid_cases", "hybrid_checks")
