from model.checkpoint.hub_headers import headers_of
from model.checkpoint.plan import plan_shards
from model.checkpoint.source import open_source
from tests.hub_server import HubServer, make_it_the_hub, quick_client


def test_a_plan_of_a_hub_repository_fetches_headers_alone(tiny, monkeypatch):
    with HubServer() as hub:
        quick_client(monkeypatch)
        make_it_the_hub(monkeypatch, hub.endpoint)
        hub.add("org/tiny", tiny)
        with headers_of("org/tiny", "main") as directory:
            planned = plan_shards(open_source(directory, "drop"), mp=2, weights="bf16", mtp="drop")
        sent = sum(hub.sent(path.name) for path in tiny.glob("*.safetensors"))
    local = plan_shards(open_source(tiny, "drop"), mp=2, weights="bf16", mtp="drop")
    assert [file.header() for file in planned.files] == [file.header() for file in local.files]
    assert (planned.legal_mp, planned.dropped, planned.args) == (local.legal_mp, local.dropped, local.args)
    assert 0 < sent <= 7 * 200_000  # the client asks for the first 100 kB of each of seven files
    assert not directory.exists()
