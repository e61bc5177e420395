"""The HTML page in a real browser: by keyboard, with its filters, without a network."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from provisioner.documents.recipe import PatchPolicy
from provisioner.drift.reports.html import print_html
from tests.drift.test_scan import run
from tests.support.drift_builds import subject

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def test_the_page_loads_nothing(settings):
    page = print_html(run(settings))
    assert "http://" not in page
    assert "https://" not in page
    assert "<link" not in page
    assert " src=" not in page


def test_what_a_patch_says_cannot_become_markup(settings):
    page = print_html(run(settings, subject()))
    assert "if x &lt; 0" in page
    assert "if x < 0" not in page
    assert page.count("<script") == 1


@pytest.fixture
def browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    selenium = pytest.importorskip("selenium.webdriver")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(flag)
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.mark.slow
def test_keyboard_filters_and_accounts(browser, settings, tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page = tmp_path / "drift.html"
    page.write_text(print_html(run(settings, subject(), subject(PatchPolicy.OPTIONAL, name="tiny"))), encoding="utf-8")
    browser.get(page.as_uri())

    cells = browser.find_elements(By.CSS_SELECTOR, ".matrix .cell")
    letters = [cell.text for cell in cells[:8]]
    assert letters[:2] == ["=", "="]
    assert letters[4] == "X*"
    assert all(cell.accessible_name for cell in cells)

    cells[3].send_keys(Keys.ARROW_RIGHT)
    focused = browser.switch_to.active_element
    assert focused.accessible_name == "bounds on 1.4: conflict, fails"
    focused.send_keys(Keys.ENTER)
    target = browser.find_element(By.ID, focused.get_attribute("href").partition("#")[2])
    assert target.get_attribute("open") is not None
    assert "the patch wants" in target.text
    assert "≠" in target.text

    search = browser.find_element(By.ID, "patch")
    search.send_keys("nothing like it")
    assert not [row for row in browser.find_elements(By.CSS_SELECTOR, ".matrix tbody tr") if row.is_displayed()]
    search.clear()
    search.send_keys("bou")
    assert [row for row in browser.find_elements(By.CSS_SELECTOR, ".matrix tbody tr") if row.is_displayed()]
