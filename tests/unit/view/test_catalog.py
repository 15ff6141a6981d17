"""Which stores the viewer shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.store import Store
from understudy.view.catalog import Catalog


def test_stores_that_are_left_out_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b", "c"):
        Store.open(tmp_path / name).close()
    catalog = Catalog([tmp_path], max_stores=2)
    assert len(catalog.scan()) == len(catalog.scan()) == 2
    (record,) = caplog.records
    assert "only the first 2 stores are shown" in record.getMessage() and str(tmp_path) in record.getMessage()
    catalog.close()
    caplog.clear()
    everything = Catalog([tmp_path], max_stores=3)
    assert len(everything.scan()) == 3 and not caplog.records
    everything.close()
