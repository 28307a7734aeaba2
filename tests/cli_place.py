"""Where tests of the command line run kt: a folder of their own, the demo model at hand. Tests import the fixture
`place`, and `weights`, which it asks for: as functions of other names, which no parameter hides."""
import json
import os

import pytest

from checkpoints import ROOT, kt, kt_ok

DEMO = ROOT / "demo" / "tiny-deepseekv3"


class Place:
    """A folder of its own, with kt's files in it and the demo model's weights at hand."""

    def __init__(self, folder, weights):
        self.folder, self.weights = folder, weights
        self.env = {**os.environ, "KT_HOME": str(folder / "home"), "KT_DEMO_MODEL": str(DEMO),
                    "HF_HOME": str(folder / "hf")}

    def kt(self, *words, **more):
        return kt(*words, env={**self.env, **more}, cwd=self.folder)

    def ok(self, *words, **more):
        done = self.kt(*words, **more)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done

    def plan(self, *words):
        return self.ok("run", "demo", "--dry-run", *words).stdout

    def figures(self, *words):
        return json.loads(self.ok("run", "demo", "--dry-run", "--json", *words).stdout)

    def models(self):
        return {entry["name"]: entry for entry in json.loads(self.ok("model", "list", "--json").stdout)}


@pytest.fixture(scope="session", name="weights")
def weights_fixture(tmp_path_factory):
    out = tmp_path_factory.mktemp("weights") / "demo-int4"
    kt_ok("quant", DEMO, "-o", out, "--numa-nodes", 1)
    return out


@pytest.fixture(name="place")
def place_fixture(tmp_path, weights):
    return Place(tmp_path, weights)
