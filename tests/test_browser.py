"""Reports in headless Chromium: no error, no request, sizes of figures, and nothing wider than the page.

Skipped without playwright (`pip install -e '.[browser]'`), and where no Chromium or Chrome is on the path.
"""

import shutil

import pytest
from sweep_folder import write

from recall_lab import folders, report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> str:
    """A report with long names, a long command and a wide table."""
    folder = tmp_path_factory.mktemp("made") / "sweep"
    for mixer in ("linear", "softmax", "a_mechanism_with_a_name_that_is_much_longer_than_others"):
        write(folder, mixer)
    write(folder, "delta_rule", state="failed", error="x" * 300)
    folders.add_command(folder, "recall-lab run " + "y" * 300, "z" * 300)
    assert report.make(folder).failed == []
    return (folder / "report.html").as_uri()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


WIDER = """() => [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll table, .scroll img"))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_in_a_browser(browser, address, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    errors, requests = [], []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(address)
    assert [url for url in requests if not url.startswith("data:")] == [address]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(WIDER) == []
    sizes = page.evaluate("[...document.images].map(i => [i.complete, i.naturalWidth, i.width, i.height])")
    assert len(sizes) == 2
    assert all(complete and natural > 300 <= w and h > 100 for complete, natural, w, h in sizes)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    assert page.evaluate("getComputedStyle(document.querySelector('.picture')).backgroundColor") == "rgb(255, 255, 255)"
    page.locator("button.copy").first.click()
    assert page.locator("button.copy").first.text_content() == "Copied"
    assert page.evaluate("getSelection().toString()") == "recall-lab run " + "y" * 300
    assert errors == []
    page.close()


def test_a_printed_page(browser, address):
    page = browser.new_page(viewport={"width": 700, "height": 800}, color_scheme="dark")
    page.goto(address)
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    assert not page.locator("button.copy").first.is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("document.documentElement.scrollWidth") == 700
    assert page.pdf()[:4] == b"%PDF"
    page.close()
