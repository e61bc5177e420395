from provisioner.probes.model import Workload
from provisioner.probes.workload import Calibration, Corpus, Message, ask_about, write_request


def test_the_same_seed_and_number_give_the_same_document() -> None:
    assert Corpus(seed=5).write_document(3, 200) == Corpus(seed=5).write_document(3, 200)


def test_documents_share_no_opening_with_others_of_any_seed() -> None:
    openings = {Corpus(seed=seed).write_document(number, 80)[:24] for seed in range(20) for number in range(20)}
    assert len(openings) == 400


def test_a_document_is_as_long_as_asked_and_begins_the_longer_ones() -> None:
    documents = [Corpus(seed=1).write_document(1, length) for length in (80, 600, 30_000)]
    assert [len(document) for document in documents] == [80, 600, 30_000]
    assert documents[2].startswith(documents[1])


def test_calibration_finds_the_length_for_a_number_of_tokens() -> None:
    calibration = Calibration.from_samples((400, 400 // 4 + 40), (2400, 2400 // 4 + 40))
    assert calibration == Calibration(fixed=40.0, per_character=0.25)
    assert calibration.characters_for(6040) == 24_000
    assert calibration.characters_for(1) == 80


def test_the_two_workloads_ask_for_different_text() -> None:
    asked = {workload: ask_about("Doc.", workload).content for workload in Workload}
    assert all(text.startswith("Doc.\n\n") for text in asked.values())
    assert "JSON" in asked[Workload.STRUCTURED]
    assert "JSON" not in asked[Workload.PROSE]


def test_a_request_asks_for_its_usage_and_takes_fields_of_the_server() -> None:
    made = write_request(
        "m", (Message(role="user", content="q"),), tokens=7, temperature=0.7, extra={"ignore_eos": True}
    )
    assert made == {
        "model": "m",
        "messages": [{"role": "user", "content": "q"}],
        "max_tokens": 7,
        "temperature": 0.7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
