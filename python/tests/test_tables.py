"""Imports of tables, against pandas' and scikit-learn's own reading of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import vega_datasets
from sklearn import datasets
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.neighbors import kneighbors_graph
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, OrdinalEncoder, StandardScaler

import helios


@pytest.fixture
def importer(tmp_path, monkeypatch, binary):
    """Imports tables and returns the folder of the dataset."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))

    def run(out="g", **options):
        helios.import_("tables", tmp_path / out, binary=binary, **options)
        return tmp_path / out

    return run


def names_of(folder, part="."):
    """The nodes' names in the order of their numbers."""
    return list(pd.read_parquet(folder / part / "names.parquet")["name"])


def edges_of(folder, part="."):
    """The edges, as pairs of numbers, by destination."""
    ptr = np.load(folder / part / "indptr.npy")
    src = np.load(folder / part / "indices.npy")
    return np.stack([src.astype(np.int64), np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))])


def same_edges(folder, table, src, dst, number, part="."):
    """Holds the edges against the pairs that pandas reads."""
    want = np.stack([table[src].map(number[0]), table[dst].map(number[1])])
    want = want[:, np.lexsort((want[0], want[1]))]
    np.testing.assert_array_equal(edges_of(folder, part), want)


def number_of(names):
    return {name: i for i, name in enumerate(names)}


def ring(names):
    """Edges from each node to the next two."""
    n = len(names)
    src = np.repeat(np.arange(n), 2)
    dst = (src + np.tile([1, 2], n)) % n
    return pd.DataFrame({"src": np.asarray(names)[src], "dst": np.asarray(names)[dst]})


WORDS = ["the", "quick", "brown", "a", "dog", "straße", "Überall", "42", "snake_case", "naïve"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("seed", range(4))
def test_transforms_are_those_of_scikit_learn(importer, tmp_path, kind, seed):
    """Random columns, learned from the training rows, are equal for all rows."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(50, 3000))
    t = pd.DataFrame(
        {
            "id": [f"n{i}" for i in rng.permutation(n)],
            "normal": rng.normal(1e6 if seed == 3 else 3, 2, n),
            "skewed": rng.lognormal(0, 2, n),
            "small": rng.integers(-5, 5, n),
            "constant": 7.5,
            "city": rng.choice(["Rome", "Oslo", "Bern", "Köln, Rhein", 'a "b"'], n),
            "grade": rng.choice([10, 9, 100], n),
            "text": [" ".join(rng.choice(WORDS, rng.integers(1, 9))) for _ in range(n)],
            "gaps": np.where(rng.random(n) < 0.2, np.nan, rng.normal(size=n)),
            "label": rng.choice(["x", "y"], n),
        }
    )
    t["vector"] = list(rng.normal(size=(n, 3))) if kind == "parquet" else ""
    if kind == "csv":
        t["vector"] = [" ".join(map(repr, map(float, v))) for v in rng.normal(size=(n, 3))]
        t.to_csv("t.csv", index=False)
        t = pd.read_csv("t.csv")
    else:
        t.to_parquet("t.parquet", row_group_size=37)
    ring(t["id"]).to_csv("e.csv", index=False)
    size = "\n  - {feature_col: vector, transform: standard, size: 3}"
    Path("d.yaml").write_text(
        f"""
nodes:
- node_type: node
  files: t.{kind}
  node_id_col: id
  features:
  - {{feature_col: [normal, small, constant], transform: standard}}
  - {{feature_col: [normal, skewed], transform: minmax}}
  - {{feature_col: skewed, transform: log}}
  - {{feature_col: [city, grade], transform: one-hot, unknown: zero}}
  - {{feature_col: city, transform: ordinal, unknown: category}}
  - {{feature_col: text, transform: bag, size: 16}}
  - {{feature_col: gaps, transform: standard, missing: mean}}{size}
  labels: [{{label_col: label, task_type: classification}}]
edges:
- {{relation: [node, to, node], files: e.csv, source_id_col: src, dest_id_col: dst}}
"""
    )
    g = importer(in_=tmp_path / "d.yaml")
    train = np.load(g / "train.npy")

    def fitted(scaler, columns):
        return scaler.fit(t.iloc[train][columns]).transform(t[columns])

    hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    ordinal = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=5)
    words = HashingVectorizer(n_features=16, alternate_sign=False)
    filled = t[["gaps"]].fillna(t["gaps"].iloc[train].mean())
    vectors = np.array([np.fromstring(v, sep=" ") if kind == "csv" else v for v in t["vector"]])
    want = np.hstack(
        [
            fitted(StandardScaler(), ["normal", "small", "constant"]),
            fitted(MinMaxScaler(), ["normal", "skewed"]),
            np.log1p(t[["skewed"]]),
            fitted(hot, ["city", "grade"]),
            fitted(ordinal, ["city"]),
            words.transform(t["text"]).toarray(),
            (filled - filled.iloc[train].dropna().mean()) / t["gaps"].iloc[train].std(ddof=0),
            StandardScaler().fit(vectors[train]).transform(vectors),
        ]
    )
    np.testing.assert_allclose(np.load(g / "features.npy"), want, rtol=2e-6, atol=2e-6)


def test_like_gives_the_same_columns(importer, binary):
    """New nodes have the columns, statistics and classes of another dataset."""
    rng = np.random.default_rng(5)
    t = pd.DataFrame(
        {
            "id": np.arange(1000, 1200),
            "x": rng.normal(5, 3, 200),
            "c": rng.choice(["a", "b", "c"], 200),
            "y": rng.choice(["no", "yes"], 200),
        }
    )
    t.to_csv("t.csv", index=False)
    ring(t["id"]).to_csv("e.csv", index=False)
    common = {"id": "id", "edges": "e.csv", "src": "src", "dst": "dst"}
    g = importer(nodes="t.csv", label="y", **common)
    t[["id", "c", "x"]].iloc[:50].assign(c="d").to_csv("new.csv", index=False)
    ring(t["id"].iloc[:50]).to_csv("e.csv", index=False)
    new = importer("new", nodes="new.csv", like=g, **common)
    old, got = np.load(g / "features.npy"), np.load(new / "features.npy")
    np.testing.assert_array_equal(got[:, 0], old[:50, 0])
    assert not got[:, 1:].any()  # the category d is unknown
    assert (g / "columns.json").read_text() == (new / "columns.json").read_text()
    assert re.search(r"class_names:\s+- \"?no\"?\s+- \"?yes\"?", (new / "dataset.yaml").read_text())
    helios.train(g, epochs=1, fanout=[2], checkpoint="run", seed=1, binary=binary)
    helios.run(
        "predict", str(new), "--checkpoint=run", "--other-dataset", "--csv=p.csv", binary=binary
    )
    p = pd.read_csv("p.csv")
    assert len(p) == 50
    names = pd.read_parquet(new / "names.parquet")["name"]
    assert names.dtype == np.int64  # pandas merges on them
    assert list(names) == list(t["id"][:50])
    more = t[["id", "c", "x"]].assign(id=t["id"] + 1000)
    more.to_csv("more.csv", index=False)
    importer("new", append=True, nodes="more.csv", id="id")
    assert names_of(new) == [*t["id"][:50], *more["id"]]
    np.testing.assert_array_equal(np.load(new / "features.npy"), np.vstack([got, old]))


def features_of(folder, part="."):
    return np.load(folder / part / "features.npy")


def test_wine(importer):
    """scikit-learn's wine, as Parquet: 13 numbers, 3 classes, neighbours by distance."""
    d = datasets.load_wine(as_frame=True)
    t = d.data.assign(name=[f"wine {i}" for i in range(len(d.data))], kind=d.target_names[d.target])
    t.to_parquet("wine.parquet")
    graph = kneighbors_graph(StandardScaler().fit_transform(d.data), 5).tocoo()
    e = pd.DataFrame({"a": t["name"].to_numpy()[graph.row], "b": t["name"].to_numpy()[graph.col]})
    e.to_parquet("near.parquet")
    g = importer(
        nodes="wine.parquet", id="name", label="kind", edges="near.parquet", src="a", dst="b"
    )
    assert names_of(g) == list(t["name"])
    train = np.load(g / "train.npy")
    want = StandardScaler().fit(d.data.iloc[train]).transform(d.data)
    np.testing.assert_allclose(features_of(g), want, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(np.load(g / "labels.npy"), d.target)
    n = number_of(t["name"])
    same_edges(g, e, "a", "b", (n, n))


def test_diabetes(importer):
    """scikit-learn's diabetes, as gzipped CSV: numbers to predict."""
    d = datasets.load_diabetes(as_frame=True, scaled=False)
    t = d.data.assign(target=d.target)
    t.to_csv("d.csv.gz", index_label="patient")
    t = pd.read_csv("d.csv.gz")
    e = ring(t["patient"])
    e.to_csv("e.tsv", index=False, sep="\t")
    g = importer(
        nodes="d.csv.gz", id="patient", label="target", target="regression", edges="e.tsv",
        src="src", dst="dst",
    )  # fmt: skip
    y = np.load(g / "tasks/000/labels.npy")
    np.testing.assert_array_equal(y[:, 0], t["target"].to_numpy(np.float32))
    train = np.load(g / "tasks/000/train.npy")
    x = t.drop(columns=["patient", "target"])
    want = StandardScaler().fit(x.iloc[train]).transform(x)
    np.testing.assert_allclose(features_of(g, "nodes/000"), want, rtol=2e-6, atol=2e-6)


def vega(name):
    return Path(vega_datasets.__file__).parent / "_data" / name


def test_airports(importer):
    """3,376 airports of the vega datasets, the file as it is: quoted names, codes, places."""
    file = vega("airports.csv")
    t = pd.read_csv(file, keep_default_na=False)  # the code of a state, or of an airport, may be NA
    e = ring(t["iata"])
    e.to_csv("e.csv", index=False)
    g = importer(
        nodes=file, id="iata", label="state", unlabelled_ok=True, edges="e.csv", src="src",
        dst="dst", feature_columns="latitude,longitude", transform="latitude=none,longitude=none",
    )  # fmt: skip
    assert names_of(g) == list(t["iata"])
    np.testing.assert_array_equal(
        features_of(g), t[["latitude", "longitude"]].to_numpy().astype(np.float32)
    )
    states = sorted(set(t["state"]) - {""})
    want = t["state"].map({**number_of(states), "": -1})
    np.testing.assert_array_equal(np.load(g / "labels.npy"), want)
    n = number_of(t["iata"])
    same_edges(g, e, "src", "dst", (n, n))


def test_weather(importer):
    """Seattle's weather of the vega datasets: days in order, the last year to test."""
    file = vega("seattle-weather.csv")
    t = pd.read_csv(file)
    ring(t["date"]).to_csv("e.csv", index=False)
    g = importer(
        nodes=file, id="date", label="weather", edges="e.csv", src="src", dst="dst",
        split_time="date:2014-07-01,2015-01-01",
    )  # fmt: skip
    day = pd.to_datetime(t["date"])
    np.testing.assert_array_equal(np.load(g / "train.npy"), np.flatnonzero(day < "2014-07-01"))
    np.testing.assert_array_equal(np.load(g / "test.npy"), np.flatnonzero(day >= "2015-01-01"))
    x = t[["precipitation", "temp_max", "temp_min", "wind"]]
    want = StandardScaler().fit(x[day < "2014-07-01"]).transform(x)
    np.testing.assert_allclose(features_of(g), want, rtol=2e-6, atol=2e-6)


def test_les_miserables(importer):
    """NetworkX's characters, and their edges as it writes them: blanks, comments, no heading."""
    graph = nx.relabel_nodes(nx.les_miserables_graph(), lambda n: n.replace(" ", "_"))
    t = pd.DataFrame({"name": list(graph), "degree": [graph.degree[n] for n in graph]})
    t.to_json("people.jsonl", orient="records", lines=True)
    nx.write_edgelist(graph, "met.txt", data=False)
    e = pd.read_csv("met.txt", sep=" ", names=["1", "2"])
    g = importer(
        nodes="people.jsonl", id="name", edges="met.txt", src="1", dst="2", header="no",
        transform="degree=none",
    )  # fmt: skip
    assert names_of(g) == list(t["name"])
    np.testing.assert_array_equal(features_of(g)[:, 0], t["degree"].to_numpy(np.float32))
    n = number_of(t["name"])
    same_edges(g, e, "1", "2", (n, n))


def test_southern_women(importer, tmp_path, binary):
    """NetworkX's women and events, two types: drafted by --describe, then imported."""
    graph = nx.davis_southern_women_graph()
    women = pd.DataFrame(
        {"woman": graph.graph["top"], "events": [graph.degree[w] for w in graph.graph["top"]]}
    )
    events = pd.DataFrame(
        {"event": graph.graph["bottom"], "size": [graph.degree[v] for v in graph.graph["bottom"]]}
    )
    came = pd.DataFrame([(a, b) for a, b in graph.edges()], columns=["woman", "event"])
    women.to_csv("women.csv", index=False)
    events.to_parquet("events.parquet")
    came.to_csv("came.tsv", sep="\t", index=False)
    text = subprocess.run(
        [binary, "import", "tables", "--describe", "women.csv,events.parquet,came.tsv"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    Path("d.yaml").write_text(text.replace("  # reverse", "  reverse").replace("standard", "none"))
    g = importer(in_=tmp_path / "d.yaml")
    assert names_of(g, "nodes/000") == list(women["woman"])
    assert names_of(g, "nodes/001") == list(events["event"])
    np.testing.assert_array_equal(
        features_of(g, "nodes/000")[:, 0], women["events"].to_numpy(np.float32)
    )
    np.testing.assert_array_equal(
        features_of(g, "nodes/001")[:, 0], events["size"].to_numpy(np.float32)
    )
    n = number_of(women["woman"]), number_of(events["event"])
    same_edges(g, came, "woman", "event", n, "edges/000")
    same_edges(g, came, "event", "woman", n[::-1], "edges/001")


def test_debian_packages(importer):
    """The packages of this machine, by name, and what they depend on."""
    status = Path("/var/lib/dpkg/status")
    if not status.exists():
        pytest.skip("no dpkg here")
    rows, links = {}, []
    for entry in status.read_text().split("\n\n"):
        field = dict(re.findall(r"^([A-Za-z-]+): (.*)$", entry, re.M))
        if "Package" not in field or field["Package"] in rows:
            continue
        rows[field["Package"]] = (
            field.get("Section", ""),
            field.get("Installed-Size", ""),
            field.get("Description", ""),
        )
        for other in re.findall(r"([a-z0-9][a-z0-9+.-]+)[^,|]*", field.get("Depends", "")):
            links.append((field["Package"], other))
    t = pd.DataFrame(
        [(k, *v) for k, v in rows.items()], columns=["package", "section", "size", "text"]
    )
    e = pd.DataFrame([x for x in links if x[1] in rows], columns=["from", "to"])
    t.to_csv("p.csv", index=False)
    e.to_csv("d.csv", index=False)
    g = importer(
        nodes="p.csv", id="package", label="section", edges="d.csv", src="from", dst="to",
        transform="size=log,text=bag:32", missing="size=0,text=zero",
        unlabelled_ok=True,
    )  # fmt: skip
    t = pd.read_csv("p.csv", keep_default_na=False)
    assert names_of(g) == list(t["package"])
    size = np.log1p(pd.to_numeric(t["size"]).fillna(0))
    words = HashingVectorizer(n_features=32, alternate_sign=False).transform(t["text"]).toarray()
    np.testing.assert_allclose(features_of(g), np.column_stack([size, words]), rtol=2e-6, atol=2e-6)
    n = number_of(t["package"])
    same_edges(g, e, "from", "to", (n, n))
