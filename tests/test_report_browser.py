"""The pages that people open, in a real browser: no error, no sideways scroll, at a laptop's and a phone's width."""

import helpers_browser
import pytest

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", helpers_browser.WIDTHS)
def test_a_fault_on_a_page_is_noticed(browser, tmp_path, width):
    page = tmp_path / "page.html"
    for fault in ("<script>throw new Error('x')</script>", "<p style='width: 3000px'>x</p>", "<img src='absent.png'>"):
        page.write_text(f"<!doctype html><title>t</title>{fault}")
        with pytest.raises(AssertionError), helpers_browser.opened(browser, page, width) as opened:
            opened.wait_for_load_state("networkidle")
    page.write_text("<!doctype html><title>t</title><p>fine</p>")
    with helpers_browser.opened(browser, page, width) as opened:
        assert opened.inner_text("p") == "fine"
