import re
from pathlib import Path

import pytest
from fake_server import FakeServer

PAGE = Path(__file__).parents[2] / "docs" / "client.md"


def test_the_example_on_the_page_works(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARRING_CLIENT_DIR", str(tmp_path))
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    exec(found[1].replace("http://127.0.0.1:8400", server.url), {})
    assert sum(f.ended for f in server.fragments.values()) == 10
    assert {f.player for f in server.fragments.values()} == {"anna"}
