import pytest

from provisioner.openai.prometheus import Metric, ServerCounters, parse_samples, print_metrics, read_counters

PAGE = r"""# HELP vllm:prefix_cache_queries_total Prefix cache queries.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="a } \"b\""} 1200.0
vllm:prefix_cache_queries_total{engine="1",model_name="a } \"b\""} 800.0
vllm:prefix_cache_queries_created{engine="0"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0"} 5e+02
vllm:spec_decode_num_drafts_total{engine="0"} 100.0 1700000000000
vllm:spec_decode_num_draft_tokens_total{engine="0"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 210.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90.0
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 3
process_open_fds 12
nothing to see
vllm:odd NaN
"""


def test_samples_keep_labels_with_braces_and_quotes() -> None:
    samples = parse_samples(PAGE)
    assert samples[0].labels == {"engine": "0", "model_name": 'a } "b"'}
    assert samples[0].value == 1200
    assert {sample.name for sample in samples} >= {"process_open_fds", "vllm:odd"}


def test_counters_are_summed_over_engines_and_told_apart_from_their_neighbours() -> None:
    assert read_counters(parse_samples(PAGE)) == ServerCounters(
        prefix_queries=2000, prefix_hits=500, drafts=100, draft_tokens=300, accepted_tokens=210
    )


def test_names_without_the_suffix_are_read_too() -> None:
    assert read_counters(parse_samples("vllm:prefix_cache_hits 3\n")).prefix_hits == 3


def test_shares_of_what_was_counted_in_between() -> None:
    before = ServerCounters(prefix_queries=2000, prefix_hits=500, drafts=100, draft_tokens=300, accepted_tokens=210)
    after = ServerCounters(prefix_queries=3000, prefix_hits=1300, drafts=110, draft_tokens=330, accepted_tokens=231)
    counted = after.since(before)
    assert counted.hit_share == 0.8
    assert counted.acceptance_share == 0.7
    assert counted.acceptance_length == pytest.approx(3.1)


def test_a_restarted_server_and_a_missing_counter_give_nothing_rather_than_nonsense() -> None:
    counted = ServerCounters(prefix_queries=10, prefix_hits=1).since(ServerCounters(prefix_queries=20, prefix_hits=0))
    assert counted.prefix_queries is None
    assert counted.hit_share is None
    assert counted.acceptance_length is None
    assert ServerCounters(prefix_queries=0.0, prefix_hits=0.0).hit_share is None


def test_printed_metrics_are_read_back() -> None:
    text = print_metrics(
        [
            Metric(name="one_total", kind="counter", help="Text.", values={"": 12}),
            Metric(name="two_total", kind="counter", help="Text.", label="why", values={'a"\\': 1.5, "b": 2}),
        ]
    )
    assert "# TYPE one_total counter\none_total 12\n" in text
    assert [(sample.labels.get("why"), sample.value) for sample in parse_samples(text)] == [
        (None, 12),
        ('a"\\', 1.5),
        ("b", 2),
    ]
