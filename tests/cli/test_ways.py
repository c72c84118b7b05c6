"""plan and compact."""

from tests.cli.conftest import Shell


def test_plan_and_compact(shell: Shell) -> None:
    shell.run("init")
    for step in range(10):
        shell.commit(step)
    before = shell.json("log")
    made = shell.json("compact", "--share", "100000", "--base-every", "8")
    assert (made["patches"], made["reverse"], made["bases"], made["swaps"], made["skipped"]) == (2, 0, 1, 1, [])
    assert made["bytes"] > 0
    assert "nothing to add" in shell.out("compact", "--share", "100000%", "--base-every", "8")
    assert "'5x'" in shell.run("compact", "--share", "5x", code=2).stderr
    after = shell.json("log")
    assert [{**one, "ways": []} for one in after] == before
    assert [len(one["ways"]) for one in after] == [0, 2, 0, 0, 0, 1, 0, 0, 0, 0]
    assert after[1]["ways"][0]["from"] == before[5]["id"]
    assert shell.out("show", "main~1").count("Edge: ") == 3

    way = shell.json("plan", "nothing", "main")
    assert (way["from"], way["to"], way["patches"]) == (None, before[0]["id"], 1)
    assert [step["from"] for step in way["steps"]] == [None, before[1]["id"]]
    assert way["requests"] == sum(step["requests"] for step in way["steps"])
    assert way["bytes"] == sum(step["bytes"] for step in way["steps"])
    assert shell.json("plan", "main~1", "main~2")["from"] is None
    assert "from nothing, since no patch leads on from main~1" in shell.out("plan", "main~1", "main~2")
    assert "from nothing: " in shell.out("plan", "nothing", "main")
    added = shell.out("compact", "--reverse", "--share", "100000", "--base-every", "8", "--save")
    assert "added 0 patches, 11 back" in added
    assert "nothing to add" in shell.out("compact")
    back = shell.json("plan", "main~1", "main~2")
    assert (back["from"], back["patches"]) == (before[1]["id"], 1)
    text = shell.out("plan", "main~1", "main~2")
    assert "from main~1: 1 patch, " in text
    assert "patch  " in text
    assert "base" in shell.out("plan", "nothing", "main")
    assert shell.json("plan", "main", "main")["steps"] == []
