"""`rollart prices`: what is in effect, import of every format, refresh from the providers' real clients."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.server
import importlib.util
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rollart.settings.load import builtin, load_prices
from rollart.settings.prices import PriceList
from rollart.tools.prices import Product, ec2_prices, modal_prices

Call = Callable[..., Any]

OFFER = Path(__file__).parent / "prices" / "lambda_offer.json"


def rows(text: str, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(text)["tables"][table]
    return found


def in_file(path: str) -> dict[tuple[str, str], Any]:
    return {(p.name, p.unit): p for p in load_prices(path).prices}


SHIPPED = in_file(str(builtin("prices.yaml")))


def test_the_list_is_what_a_run_goes_by(rollart: Call) -> None:
    Path("mine.yaml").write_text(
        "prices:\n  - {name: H20, unit: device-hour, usd: 1.5, date: 2020-01-01, source: a contract}\n"
        "  - {name: cpu, usd: 0.04, date: 2020-01-01, source: a contract}\n"
    )
    Path("cluster.yaml").write_text(
        "name: c\nprices: mine.yaml\npools:\n  - {name: here, device: cpu, count: 2, price: 0.01}\n"
        "price_list:\n  - {name: cpu, usd: 0.03, date: 2020-01-01, source: the spec}\n"
    )
    found = {
        r["name"]: r for r in rows(rollart("prices", "list", "--cluster", "cluster.yaml", "-o", "json").out, "prices")
    }
    assert {name: (r["usd"], r["source"]) for name, r in found.items()} == {
        "H20": (1.5, "a contract"),
        "cpu": (0.03, "the spec"),
        "cpu@here": (0.01, "pool 'here' of cluster.yaml"),
    }
    assert found["H20"]["age_days"] == (dt.date.today() - dt.date(2020, 1, 1)).days
    text = rollart("prices", "list", "--cluster", "cluster.yaml").out
    assert "2 of 3 prices are older than 180 days (H20, cpu)" in text
    assert len(rows(rollart("prices", "list", "-o", "json").out, "prices")) == len(SHIPPED)


def test_a_file_starts_from_the_shipped_list_and_is_added_to(rollart: Call) -> None:
    Path("a.csv").write_text(
        "name,unit,usd,source,date\nH100,device-hour,2.10,our contract,2026-11-01\n"
        "onprem,GB-second,0.0000011,amortised,2026-11-01\n"
    )
    first = rollart("prices", "import", "a.csv")
    assert first.code == 0, first.err
    assert "2.69" in first.out
    assert "$1.10 / 1M" in first.out
    written = in_file("prices.yaml")
    assert written.keys() == SHIPPED.keys() | {("onprem", "GB-second")}
    assert (written["H100", "device-hour"].usd, written["H100", "device-hour"].date) == (2.1, dt.date(2026, 11, 1))
    assert {k: p for k, p in written.items() if k in SHIPPED and k[0] != "H100"} == {
        k: p for k, p in SHIPPED.items() if k[0] != "H100"
    }, "the rest is as it was"
    Path("b.json").write_text(
        json.dumps([{"name": "H100", "unit": "device-hour", "usd": 1.9, "source": "s", "date": "2026-11-20"}])
    )
    (change,) = rows(rollart("prices", "import", "b.json", "-o", "json").out, "changes")
    assert (change["before"], change["after"]) == (2.1, 1.9)
    assert in_file("prices.yaml")["onprem", "GB-second"].usd == 0.0000011, "what was imported before stays"
    assert "1 as before" in rollart("prices", "import", "b.json").out
    shutil.copy(builtin("prices.yaml"), "c.yaml")
    assert rollart("prices", "import", "c.yaml", "--into", "new/d.yaml").code == 0
    assert in_file("new/d.yaml") == SHIPPED
    assert "prices.yaml: ok (PriceList)" in rollart("validate", "prices.yaml").out


def test_a_part_of_a_models_prices_is_added_to_the_other_part(rollart: Call) -> None:
    model = "{name: NAME, unit: million-input-tokens, usd: 0.3, date: 2026-11-01, source: s}"
    Path("known.yaml").write_text(f"prices: [{model.replace('NAME', 'api.openai.com/gpt-5-mini')}]\n")
    done = rollart("prices", "import", "known.yaml")
    assert done.code == 0, done.err
    Path("new.yaml").write_text(f"prices: [{model.replace('NAME', 'm')}]\n")
    before = Path("prices.yaml").read_text()
    done = rollart("prices", "import", "new.yaml")
    assert done.code == 2
    assert "'m' has a price per million-input-tokens and none per million-output-tokens" in done.err
    assert Path("prices.yaml").read_text() == before


def test_an_offer_of_aws_is_read(rollart: Call) -> None:
    """The tier that starts at 0 of the newest term, the plainest product of a group, requests by the million."""
    done = rollart("prices", "import", str(OFFER), "-o", "json")
    assert done.code == 0, done.err
    assert {(r["name"], r["unit"]): r["after"] for r in rows(done.out, "changes")} == {
        ("aws_lambda", "GB-second"): 0.0000166667,
        ("aws_lambda-arm", "GB-second"): 0.0000133334,
        ("aws_lambda", "million-requests"): 0.22,
        ("aws_lambda", "idle-GB-second"): 0.0000046,
    }
    written = in_file("prices.yaml")["aws_lambda", "GB-second"]
    assert (written.date, written.source) == (dt.date(2026, 10, 2), "AWS Lambda eu-west-1, EU-Lambda-GB-Second")


def test_offers_of_many_regions_need_one_named(rollart: Call) -> None:
    offer = json.loads(OFFER.read_text())
    offer["products"]["D2"]["attributes"]["regionCode"] = "us-east-1"
    Path("offer.json").write_text(json.dumps(offer))
    assert "name one with --region" in rollart("prices", "import", "offer.json").err
    (only,) = rows(rollart("prices", "import", "offer.json", "--region", "us-east-1", "-o", "json").out, "changes")
    assert only["name"] == "aws_lambda-arm"
    assert "no price of mars" in rollart("prices", "import", "offer.json", "--region", "mars").err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.csv", "name,usd\nH100,2\n", "x.csv:1:1: columns unit, source, date are missing"),
        ("x.csv", "name,unit,usd,source,date\nH100,device-hour\n", "x.csv:2:1: a row needs 5 values"),
        ("x.csv", "name,unit,usd,source,date\nH100,hour,2,s,2026-01-01\n", "prices.0.unit is 'hour'"),
        ("x.csv", "name,unit,usd,source,date\n", "at least 1 item"),
        ("x.json", "[{", "x.json:1:"),
        ("x.json", '{"offerCode": "AmazonS3", "products": {}}', "an offer of AmazonS3"),
        ("x.json", '{"offerCode": "AWSLambda", "products": {}}', "not an AWS offer file"),
        ("x.json", '{"a": 1}', "prices is None"),
        ("x.yaml", "prices: 3\n", "x.yaml:1:"),
        ("none.csv", None, "No such file"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(rollart: Call, name: str, text: str | None, said: str) -> None:
    if text is not None:
        Path(name).write_text(text)
    done = rollart("prices", "import", name)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not Path("prices.yaml").exists()


def test_the_shipped_list_is_never_written(rollart: Call) -> None:
    before = builtin("prices.yaml").read_bytes()
    done = rollart("prices", "import", str(OFFER), "--into", str(builtin("prices.yaml")))
    assert (done.code, builtin("prices.yaml").read_bytes()) == (2, before)
    assert "the shipped price list" in done.err
    Path("file").write_text("")
    assert "--into" in rollart("prices", "import", str(OFFER), "--into", "file/prices.yaml").err


def instance(name: str, usd: str, **more: str) -> Product:
    attributes = {
        "instanceType": name,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
        "vcpu": "4",
        "regionCode": "us-east-1",
    }
    return Product(name + str(more), "Compute Instance", attributes | more, Decimal(usd))


def test_a_device_is_its_share_of_the_cheapest_instance() -> None:
    """By hand; Windows, spot capacity, other families and instances without a price are passed over."""
    offered = [
        instance("p5.48xlarge", "55.04", gpu="8"),
        instance("g5.xlarge", "1.006", gpu="1"),
        instance("g5.12xlarge", "3.00", gpu="4"),
        instance("c7i.xlarge", "0.1785"),
        instance("c6i.2xlarge", "0.34", vcpu="8"),
        instance("g6.xlarge", "0.1", gpu="1", operatingSystem="Windows"),
        instance("m7i.large", "0.01"),
        instance("g4dn.xlarge", "0", gpu="1"),
    ]
    found = {p.name: (p.usd, p.source) for p in ec2_prices(offered, dt.date(2026, 11, 1))}
    assert found == {
        "A10G": (0.75, "AWS EC2 us-east-1, g5.12xlarge on demand"),
        "H100": (6.88, "AWS EC2 us-east-1, p5.48xlarge on demand"),
        "cpu": (0.085, "AWS EC2 us-east-1, c6i.2xlarge on demand"),
    }


def test_rates_of_modal() -> None:
    """Busy and idle alike; devices that the list has from Modal; surcharges and what is not known are left alone."""
    rates = {
        "cpu_core_second": "0.00002",
        "memory_gib_hour": "0.0072",
        "gpu_l4_second": "0.0003",
        "gpu_h100_second": "0.001",
        "gpu_quantum_second": "1",
        "cpu_core_second_eu": "9",
        "volume_gib_month": "0.09",
        "gpu_l4": "1",
    }
    found, unused = modal_prices(
        {k: Decimal(v) for k, v in rates.items()}, load_prices(builtin("prices.yaml")), dt.date(2026, 11, 1)
    )
    assert {(p.name, p.unit): p.usd for p in found} == pytest.approx(
        {
            ("modal", "core-second"): 0.00002,
            ("modal", "idle-core-second"): 0.00002,
            ("modal", "GiB-second"): 0.000002,
            ("modal", "idle-GiB-second"): 0.000002,
            ("cpu", "device-hour"): 0.072,
            ("L4", "device-hour"): 1.08,
            ("modal-L4", "gpu-second"): 0.0003,
            ("modal-L4", "idle-gpu-second"): 0.0003,
            ("modal-H100", "gpu-second"): 0.001,
            ("modal-H100", "idle-gpu-second"): 0.001,
        }
    )
    assert unused == ["cpu_core_second_eu", "gpu_l4", "gpu_quantum_second", "volume_gib_month"]


def test_a_rate_of_modal_is_no_price_of_another_provider() -> None:
    shipped = load_prices(builtin("prices.yaml")).prices
    busy = next(p for p in shipped if (p.name, p.unit) == ("modal-L4", "gpu-second"))
    idle = next(p for p in shipped if (p.name, p.unit) == ("modal-L4", "idle-gpu-second"))
    others = [p.model_copy(update={"name": "nebula-L4"}) for p in (busy, idle)]
    for known in ([busy, idle, *others], [*others, busy, idle]):
        found, unused = modal_prices({"gpu_l4_second": Decimal("0.0003")}, PriceList(prices=known), busy.date)
        assert {(p.name, p.unit) for p in found} == {("modal-L4", "gpu-second"), ("modal-L4", "idle-gpu-second")}
        assert unused == []
    found, unused = modal_prices({"gpu_l4_second": Decimal("0.0003")}, PriceList(prices=others), busy.date)
    assert (found, unused) == ([], ["gpu_l4_second"])


# From the providers. moto has no pricing service, so AWS's answers come from a server here, through boto3's own client.


@pytest.fixture
def aws_prices(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """`GetProducts` in two pages, from the offer; the requests that came."""
    offer, asked = json.loads(OFFER.read_text()), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append({"target": self.headers["X-Amz-Target"], "auth": self.headers["Authorization"], **given})
            region = next(f["Value"] for f in given["Filters"] if f["Field"] == "regionCode")
            own = [
                {
                    "product": p,
                    "serviceCode": "AWSLambda",
                    "publicationDate": offer["publicationDate"],
                    "terms": {"OnDemand": offer["terms"]["OnDemand"][sku]},
                }
                for sku, p in offer["products"].items()
                if p["attributes"]["regionCode"] == region
            ]
            page = own[3:] if given.get("NextToken") else own[:3]
            answer: dict[str, Any] = {"FormatVersion": "aws_v1", "PriceList": [json.dumps(one) for one in page]}
            if own and not given.get("NextToken"):
                answer["NextToken"] = "more"
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No credentials of any provider, and no host that might give some."""
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "MODAL_TOKEN_ID",
        "MODAL_TOKEN_SECRET",
        "MODAL_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", "MODAL_CONFIG_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


needs_aws = pytest.mark.skipif(importlib.util.find_spec("boto3") is None, reason="boto3 is not installed")


@pytest.mark.slow  # imports boto3, talks over sockets
@needs_aws
@pytest.mark.usefixtures("nobody")
def test_aws_tells_its_prices_of_the_clusters_region(rollart: Call, aws_prices: list[dict[str, Any]]) -> None:
    Path("cluster.yaml").write_text(
        "name: c\npools:\n  - {name: here, device: cpu, count: 2}\n"
        "functions: {backend: aws_lambda, aws_lambda: {region: eu-west-1}}\n"
    )
    done = rollart("prices", "refresh", "--provider", "aws", "--cluster", "cluster.yaml", "-o", "json")
    assert done.code == 0, done.err
    assert {(r["name"], r["unit"]): (r["before"], r["after"]) for r in rows(done.out, "changes")} == {
        ("aws_lambda", "GB-second"): (0.0000166667, 0.0000166667),
        ("aws_lambda-arm", "GB-second"): (0.0000133334, 0.0000133334),
        ("aws_lambda", "million-requests"): (0.2, 0.22),
        ("aws_lambda", "idle-GB-second"): (0.0000041667, 0.0000046),
    }
    assert len(aws_prices) == 2, "every page"
    assert aws_prices[0]["target"] == "AWSPriceListService.GetProducts"
    assert aws_prices[0]["ServiceCode"] == "AWSLambda"
    assert "/us-east-1/pricing/" in aws_prices[0]["auth"], "the only place that answers"
    none = rollart("prices", "refresh", "--provider", "aws", "--region", "mars-1")
    assert none.code != 0
    assert "no such product" in none.err


@pytest.mark.slow  # imports boto3 and modal
@needs_aws
@pytest.mark.usefixtures("nobody")
def test_without_credentials_the_remedy_is_told(rollart: Call) -> None:
    done = rollart("prices", "refresh", "--provider", "aws")
    assert (done.code, done.out) == (3, "")
    assert "AWS_ACCESS_KEY_ID" in done.err
    both = rollart("prices", "refresh")
    assert both.code == 3
    assert "Lambda" in both.err
    assert "Modal" in both.err
    assert not Path("prices.yaml").exists()
    wrong = rollart("prices", "refresh", "--provider", "local")
    assert wrong.code == 2
    assert "tells no prices" in wrong.err


@pytest.mark.slow  # imports boto3 and modal, talks over sockets
@needs_aws
@pytest.mark.usefixtures("nobody")
def test_what_could_not_be_asked_is_told_and_the_rest_is_written(
    rollart: Call, aws_prices: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    done = rollart("prices", "refresh")
    assert done.code == 0
    assert "not refreshed: modal: " in done.err
    assert "remedy: " in done.err
    assert in_file("prices.yaml")["aws_lambda", "million-requests"].usd == 0.22


@pytest.mark.slow  # a Modal plane in a process of its own
@pytest.mark.skipif(importlib.util.find_spec("modal") is None, reason="modal is not installed")
def test_modal_tells_its_workspaces_rates(rollart: Call) -> None:
    from tests.serverless.modal_plane.apps import RATES
    from tests.serverless.modal_plane.provider import running_plane

    with contextlib.ExitStack() as stack:
        stack.enter_context(running_plane())
        done = rollart("prices", "refresh", "--provider", "modal", "-o", "json")
    assert done.code == 0, done.err
    found = {(r["name"], r["unit"]): r["after"] for r in rows(done.out, "changes")}
    assert found["modal", "core-second"] == found["modal", "idle-core-second"] == float(RATES["cpu_core_second"])
    assert found["modal", "GiB-second"] == float(RATES["memory_gib_second"])
    assert found["L4", "device-hour"] == pytest.approx(3600 * float(RATES["gpu_l4_second"]))
    busy, idle = found["modal-L4", "gpu-second"], found["modal-L4", "idle-gpu-second"]
    assert busy == idle == float(RATES["gpu_l4_second"])
    assert in_file("prices.yaml")["modal", "core-second"].date == dt.date.today()
