import json

from tests.cli.conftest import Shell, weights
from tests.kit.servers import Place


def test_a_round_on_real_s3(shell: Shell, s3_place: Place) -> None:
    shell.env |= {
        "WEIGHTVC_REPO": s3_place.url,
        "AWS_ACCESS_KEY_ID": str(s3_place.options["access_key"]),
        "AWS_SECRET_ACCESS_KEY": str(s3_place.options["secret_key"]),
        "AWS_REGION": "us-east-1",
    }
    server = ["--endpoint-url", str(s3_place.options["endpoint_url"])]
    assert shell.json(*server, "init")["url"].rstrip("/") == s3_place.url
    shell.fails(4, *server, "init")
    # The usual variable of AWS does as well.
    shell.env["AWS_ENDPOINT_URL"] = server[1]
    shell.commit(0)
    newest = shell.commit(1)
    shell.run("checkout", "main~1", "out")
    done = shell.run("pull", "main", "--into", "out", "--stats", "--json")
    assert json.loads(done.stdout)["id"] == newest
    assert json.loads(done.stderr)["stats"]["writes"] == 0
    assert (shell.cwd / "out/model.safetensors").read_bytes().endswith(weights(1)["w"])
    assert shell.json("verify", "out")["ok"]
    assert [entry["step"] for entry in shell.json("log")] == [1, 0]
    shell.fails(9, "log", env={"AWS_SECRET_ACCESS_KEY": "wrong"})
    # What a directory says of itself is enough to find its server again.
    del shell.env["AWS_ENDPOINT_URL"], shell.env["WEIGHTVC_REPO"]
    shell.run(*server, "-r", s3_place.url, "pull", "main~1", "--into", "there")
    assert shell.json("verify", "there")["ok"]
    shell.run("pull", "main", "--into", "there")
    assert shell.json("verify", "there")["ok"]
    assert [entry["step"] for entry in shell.json("log", cwd=shell.cwd / "there")] == [1, 0]
