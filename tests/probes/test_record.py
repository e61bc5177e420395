import json

import pytest

from provisioner.probes.record import InvalidProbeRecordError, read_run, to_json
from tests.support.probe_runs import run_of

RUN = run_of((60.0, 61.5, 59.25), (50.0,), ended="interrupted")


def test_a_run_is_read_back_as_it_was_written() -> None:
    assert read_run(json.dumps(to_json(RUN)), where="a.json") == RUN


def test_the_keys_of_the_record() -> None:
    record = to_json(RUN)
    assert record["schema"] == "provision/probe/1"
    assert list(record) == [
        "schema", "tool_version", "started", "seconds", "ended", "server", "provenance", "settings", "points", "notes",
    ]  # fmt: skip
    assert record["points"][0]["setting"] == {"context": 1000}
    assert record["points"][0]["measures"][0] == {
        "quantity": "decode",
        "unit": "tok/s",
        "better": "higher",
        "median": 60.0,
        "min": 59.25,
        "max": 61.5,
        "values": [60.0, 61.5, 59.25],
    }
    assert record["provenance"] == {"recipe": "hynix", "receipt_digest": "ab", "card": "a card", "driver": "610.43.03"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "a.json: not JSON"),
        ("[]", "a.json: not a record of a probe run (expected provision/probe/1, found list)"),
        ('{"schema": "provision/probe/2"}', "(expected provision/probe/1, found provision/probe/2)"),
        ('{"schema": "provision/probe/1"}', "a.json: seconds: cannot be read: KeyError('seconds')"),
    ],
)
def test_what_is_no_record_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InvalidProbeRecordError) as caught:
        read_run(text, where="a.json")
    assert message in str(caught.value)


def test_a_measure_without_values_is_refused_with_its_address() -> None:
    record = json.loads(json.dumps(to_json(RUN)))
    record["points"][1]["measures"][0]["values"] = []
    with pytest.raises(InvalidProbeRecordError) as caught:
        read_run(json.dumps(record), where="a.json")
    assert caught.value.where == "a.json: points[1]"
