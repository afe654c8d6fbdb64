"""`SchedulerConfig`'s policy: names, TOML, dicts and keywords, and that it can be read back."""

from types import MappingProxyType

import pytest
from scheduler_kit import make_scheduler

SCALARS = {
    "fairness": "weighted",
    "order": "edf",
    "admission": "guaranteed",
    "victim": "cost",
    "max_overtakes": 3,
    "max_preemptions": 2,
    "max_prefill_interval": 5,
    "max_batch_pause_steps": 7,
    "aging_s": 2.5,
    "aged_share": 0.25,
    "target_itl_ms": 40.0,
    "max_queue_s": 12.5,
}
CLASS = {
    "target_itl_ms": 30.0,
    "ttft_deadline_ms": 2000.0,
    "deadline_ms": 60000.0,
    "max_tokens": 20,
    "max_num_seqs": 3,
    "queue_share": 0.5,
}
TENANT = {
    "weight": 4.0,
    "priority": "batch",
    "requests_per_min": 600.0,
    "tokens_per_min": 100000.0,
    "max_tokens": 30,
    "max_num_seqs": 2,
    "target_itl_ms": 35.0,
    "ttft_deadline_ms": 1500.0,
    "deadline_ms": 50000.0,
}
TABLES = {
    "classes": {"interactive": CLASS},
    "tenants": {"gold": TENANT, "": {"weight": 0.5}},
    "default_tenant": {**TENANT, "weight": 2.0},
}


def config_of(**options):
    return make_scheduler(**options).config


def settings(**options):
    return config_of(**options).policy_settings


@pytest.mark.parametrize("name", ["fcfs", "fair", "static"])
def test_a_built_in_is_read_back_by_name(name):
    config = config_of(policy=name)
    assert config.policy == config.policy_settings["policy"] == name
    assert settings(policy=config.policy_settings) == config.policy_settings


def test_the_built_ins_are_those_of_the_documentation():
    fcfs, fair = config_of(), config_of(policy="fair")
    assert (fcfs.policy, fair.policy) == ("fcfs", "fair")
    assert (fcfs.fairness, fcfs.order, fcfs.admission) == ("off", "fcfs", "prompt")
    assert (fcfs.victim, fcfs.max_overtakes) == ("newest", 0)
    assert (fair.fairness, fair.order, fair.admission) == ("weighted", "edf", "estimated")
    assert (fair.victim, fair.max_overtakes, fair.max_preemptions) == ("cost", 16, 4)
    assert (fair.max_prefill_interval, fair.max_batch_pause_steps) == (8, 32)
    assert (fair.aging_s, fair.aged_share) == (10.0, 0.05)
    assert fair.target_itl_ms is None
    assert fair.max_queue_s is None
    shares = [limits["queue_share"] for limits in fair.policy_settings["classes"].values()]
    assert shares == [1.0, 0.95, 0.8]


@pytest.mark.parametrize("as_keywords", [False, True])
def test_every_key_is_read_from_a_dict_and_from_keywords_and_read_back(as_keywords):
    rules = SCALARS | TABLES
    given = {"policy": "fair", **rules} if as_keywords else {"policy": {"policy": "fair", **rules}}
    config = config_of(**given)
    read = config.policy_settings
    assert set(read) == {"policy", *rules}, "every key is tried here"
    for name, value in SCALARS.items():
        assert read[name] == getattr(config, name) == value, name
    assert read["classes"]["interactive"] == CLASS
    assert read["classes"]["standard"] == settings(policy="fair")["classes"]["standard"]
    assert read["tenants"]["gold"] == TENANT
    assert read["tenants"][""]["weight"] == 0.5
    assert read["default_tenant"] == TABLES["default_tenant"]
    assert settings(policy=read) == read


def test_a_toml_file_says_the_same(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(
        'policy = "fcfs"\nvictim = "cost"\ntarget_itl_ms = 50\n'
        "[classes.batch]\nmax_num_seqs = 2\n[tenants.gold]\nrequests_per_min = 60\n"
    )
    expected = settings(
        policy="fcfs",
        victim="cost",
        target_itl_ms=50,
        classes={"batch": {"max_num_seqs": 2}},
        tenants={"gold": {"requests_per_min": 60}},
    )
    assert settings(policy=path) == settings(policy=str(path)) == expected
    assert settings(policy=path, victim="newest") == expected | {"victim": "newest"}


def test_keywords_win_over_the_policy_and_none_leaves_it():
    policy = {
        "aging_s": 3.0,
        "classes": {"batch": {"max_tokens": 5, "max_num_seqs": 2}},
        "tenants": {"gold": {"weight": 2.0}},
    }
    read = settings(
        policy=policy,
        aging_s=None,
        max_overtakes=1,
        classes={"batch": {"max_tokens": 7}},
        tenants={"silver": {"weight": 3.0}},
    )
    assert read["policy"] == "fair", "what a dict without a name starts from"
    assert (read["aging_s"], read["max_overtakes"]) == (3.0, 1)
    assert (read["classes"]["batch"]["max_tokens"], read["classes"]["batch"]["max_num_seqs"]) == (
        7,
        2,
    )
    assert {name: limits["weight"] for name, limits in read["tenants"].items()} == {
        "gold": 2.0,
        "silver": 3.0,
    }


def test_none_in_a_dict_takes_an_optional_value_away():
    policy = {"target_itl_ms": 5.0, "classes": {"batch": {"max_tokens": 5}}}
    assert settings(policy=policy | {"target_itl_ms": None})["target_itl_ms"] is None


def test_static_has_no_rules_and_none_is_no_rule():
    config = config_of(policy="static", victim=None, classes=None)
    assert config.policy_settings == {"policy": "static"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": {"vicitm": "cost"}}, r"^vicitm is no setting.*did you mean victim\?"),
        (
            {"classes": {"interactive": {"target_itl": 3}}},
            r"^classes\.interactive\.target_itl is no setting.*target_itl_ms",
        ),
        ({"classes": {"urgent": {}}}, r"^classes\.urgent .*interactive, standard, batch"),
        ({"tenants": {"gold": {"wieght": 1}}}, r"^tenants\.gold\.wieght .*did you mean weight"),
        ({"default_tenant": {"zzzzz": 1}}, r"^default_tenant\.zzzzz .*there are weight, priority"),
        ({"policy": "lifo"}, r"unknown policy \"lifo\".*\.toml"),
        ({"policy": {"policy": "lifo"}}, "unknown policy"),
        ({"victim": "oldest"}, r'^victim is "oldest"; choose one of "newest", "cost"'),
        ({"tenants": {"gold": {"priority": "x"}}}, r'^tenants\.gold\.priority is "x"'),
        ({"aging_s": -1}, "^aging_s is -1"),
        ({"aging_s": float("nan")}, "^aging_s is NaN"),
        ({"aging_s": 10**400}, "^aging_s is inf"),
        ({"aged_share": 0}, "^aged_share is 0"),
        ({"target_itl_ms": 0}, r"^target_itl_ms is 0, but must be between 0\.001 and"),
        ({"max_queue_s": 0}, "^max_queue_s is 0"),
        ({"max_overtakes": 256}, "^max_overtakes is 256"),
        ({"max_preemptions": -1}, "^max_preemptions is -1"),
        ({"max_prefill_interval": 0}, "^max_prefill_interval is 0"),
        ({"max_batch_pause_steps": 2**40}, "^max_batch_pause_steps is 1099511627776"),
        ({"classes": {"batch": {"queue_share": 1.5}}}, r"^classes\.batch\.queue_share is 1\.5"),
        ({"classes": {"batch": {"max_num_seqs": -1}}}, r"^classes\.batch\.max_num_seqs is -1"),
        ({"tenants": {"": {"weight": 0}}}, r'^tenants\.""\.weight is 0'),
        ({"default_tenant": {"max_tokens": 0}}, r"^default_tenant\.max_tokens is 0"),
        ({"tenants": {"gold": {"max_num_seqs": 2}}}, "max_num_seqs of a tenant needs fairness"),
        ({"policy": "static", "victim": "cost"}, r'"static" has no rules, but victim was given'),
        ({"policy": {"policy": "static", "classes": {}}}, "classes was given"),
        ({"policy": "/nowhere/rules.toml"}, r"cannot be read from /nowhere/rules\.toml"),
    ],
)
def test_a_wrong_value_is_a_value_error_that_says_where(options, message):
    with pytest.raises(ValueError, match=message):
        config_of(**options)


def test_tables_may_be_any_mapping():
    def frozen(table):
        is_table = isinstance(table, dict)
        return MappingProxyType({k: frozen(v) for k, v in table.items()}) if is_table else table

    given = settings(policy="fair", **{name: frozen(table) for name, table in TABLES.items()})
    assert given == settings(policy="fair", **TABLES)


@pytest.mark.parametrize(
    "tables", [{"tenants": {"a": {"weight": 2}}}, {"default_tenant": {"weight": 0.5}}]
)
def test_a_weight_without_shares_is_refused(tables):
    with pytest.raises(ValueError, match=r"^weight of a tenant needs fairness"):
        config_of(policy="fcfs", **tables)
    assert config_of(policy="fcfs", tenants={"a": {"weight": 1}}).policy == "fcfs"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aging_s": "10"}, "^aging_s must be a number, not str"),
        ({"aging_s": True}, "^aging_s must be a number, not bool"),
        ({"policy": {"aging_s": None}}, "^aging_s must be a number, not NoneType"),
        ({"max_overtakes": 1.5}, "^max_overtakes must be an integer, not float"),
        ({"max_overtakes": False}, "^max_overtakes must be an integer, not bool"),
        ({"order": 3}, "^order must be a string, not int"),
        ({"classes": ["batch"]}, "^classes must be a dict, not list"),
        ({"classes": {"batch": 3}}, r"^classes\.batch must be a dict, not int"),
        ({"classes": {"batch": {"max_tokens": "5"}}}, r"^classes\.batch\.max_tokens must be an"),
        ({"tenants": {3: {}}}, "^a key of tenants must be a string, not int"),
        ({"default_tenant": None, "policy": 3}, "^policy must be the name of"),
        ({"policy": b"fair"}, "^policy must be a string or a path"),
        ({"vicitm": "cost"}, "unexpected keyword argument 'vicitm'"),
        ({"vicitm": None}, "unexpected keyword argument 'vicitm'"),
    ],
)
def test_a_value_of_another_type_is_a_type_error_that_says_where(options, message):
    with pytest.raises(TypeError, match=message):
        config_of(**options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("victim = ", r"cannot be read from .*rules\.toml"),
        ("vicitm = 'cost'", r"rules\.toml: vicitm is no setting"),
        ("[tenants.gold]\nweight = 0", r"rules\.toml: tenants\.gold\.weight is 0"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        config_of(policy=path)
