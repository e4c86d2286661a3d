"""The page with a keyboard, for screen readers, in both colour schemes, and on a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.echo_server import EchoServer
from helpers.web_page import TALL, WIDE, Page
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

SECTIONS = {"light": (246, 246, 244), "dark": (19, 21, 24)}
PHONE = 360, 740
TEA = "Write a short poem about tea."


def colour(page: Page, selector: str, name: str) -> tuple[int, ...]:
    script = """
        const context = document.createElement('canvas').getContext('2d');
        context.fillStyle = getComputedStyle(document.querySelector(arguments[0]))[arguments[1]];
        context.fillRect(0, 0, 1, 1);
        return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
    """
    return tuple(page.script(script, selector, name))


def luminance(rgb: tuple[int, ...]) -> float:
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """The contrast of two colours (WCAG 2.2, section 1.4.3)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_everything_can_be_reached_and_used_with_the_keyboard(demo: EchoServer, page: Page) -> None:
    page.open(demo.url)
    page.set("max_tokens", "16")
    page.script("document.querySelector('.skip').focus()")
    stops = [page.focused.accessible_name]
    for _ in range(40):
        page.press(Keys.TAB)
        focused = page.focused
        if focused.tag_name == "body":
            break
        stops.append(focused.accessible_name)
        assert focused.accessible_name, focused.get_attribute("outerHTML")
        assert page.script(
            "const one = document.activeElement, style = getComputedStyle(one.closest('.composer') ?? one);"
            "return one.matches(':focus-visible') && (style.outlineStyle !== 'none' || style.borderStyle !== 'none')"
        )
    expected = ["Skip to content", "Chat", "Colours: as the system", "Conversation", "Message", "New chat", "Send"]
    expected += ["Settings", "System prompt", "Temperature", "Top p", "Max. tokens", "Seed", "Tools, as JSON"]
    assert stops == [*expected, "Tool choice"]
    page.press(Keys.TAB, Keys.TAB, Keys.TAB)
    page.script("document.getElementById('tab-chat').focus()")
    page.press(Keys.ARROW_RIGHT)
    assert page.focused.get_attribute("id") == "tab-live"
    assert page.shown("live")
    assert not page.shown("chat")
    page.press(Keys.ARROW_RIGHT)
    assert page.shown("chat")
    page.press(Keys.TAB, Keys.TAB, Keys.TAB)
    assert page.focused.accessible_name == "Message"
    page.press("Hello")
    page.press_with_shift(Keys.ENTER)
    page.press("there", Keys.ENTER)
    page.until(lambda: page.text(".turn.assistant .text") and page.shown("send"))
    assert page.chats()[0]["messages"] == [{"role": "user", "content": "Hello\nthere"}]
    assert page.focused.accessible_name == "Message"
    names = []
    while "Regenerate" not in names:
        page.press_with_shift(Keys.TAB)
        names.append(page.focused.accessible_name)
        assert len(names) < 6, names
    page.press(Keys.ENTER)
    page.until(lambda: len(page.chats()) == 2 and page.shown("send"))


def test_a_screen_reader_gets_the_whole_reply_once(demo: EchoServer, page: Page) -> None:
    page.open(demo.url)
    page.set("max_tokens", "30")
    page.script(
        "window.spoken = []; const one = document.getElementById('spoken');"
        "new MutationObserver(() => window.spoken.push(one.textContent))"
        ".observe(one, {childList: true, characterData: true, subtree: true})"
    )
    reply = page.ask("Describe the sea in one paragraph.")
    spoken = page.until(lambda: page.script("return window.spoken"))
    assert spoken[0] == "The model is writing."
    assert len(spoken) == 2
    assert "".join(spoken[1].split()) == "".join(reply.split())
    live = page.all("[aria-live], [role=status], [role=alert], [role=log]")
    assert {one.get_attribute("id") for one in live} == {"trouble", "key-error", "spoken", "live-note"}
    assert page.find("spoken").get_attribute("role") == "status"
    for id_, role in (("tabs", "tablist"), ("tab-chat", "tab"), ("chat", "tabpanel")):
        assert page.find(id_).aria_role == role


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_follow_the_system_and_the_switch(demo: EchoServer, page: Page, pictures: Path, theme: str) -> None:
    page.prefer("prefers-color-scheme", theme)
    page.open(demo.url)
    page.set("temperature", "0")
    page.set("max_tokens", "90")
    page.ask(TEA)
    assert colour(page, "body", "backgroundColor") == SECTIONS[theme]
    for selector, ground in (("body", "body"), (".hint", ".composer"), ("#send", "#send"), (".turn .about", "body")):
        pair = colour(page, selector, "color"), colour(page, ground, "backgroundColor")
        assert contrast(*pair) >= 4.5, (selector, pair)
    page.save(pictures / f"web_chat_{theme}.png")
    if theme == "light":
        page.size(*PHONE)
        page.find("settings").find_element(By.TAG_NAME, "summary").click()
        page.save(pictures / "web_phone.png")
        page.size(WIDE, TALL)
    other = "dark" if theme == "light" else "light"
    for _ in range(3):
        page.find("theme").click()
        if page.find("theme").accessible_name == f"Colours: {other}":
            break
    assert colour(page, "body", "backgroundColor") == SECTIONS[other]
    page.open(demo.url)
    assert colour(page, "body", "backgroundColor") == SECTIONS[other]


@pytest.mark.parametrize("width", [PHONE[0], 768, WIDE])
def test_nothing_is_wider_than_the_screen(echo: EchoServer, page: Page, width: int) -> None:
    """The reply is the message, whose code and words do not fit a line."""
    page.size(width, PHONE[1])
    page.open(echo.url)
    wide = "</think>```\n" + "x" * 300 + "\n```\n" + "y" * 200
    page.script("arguments[0].value = arguments[1]", page.find("prompt"), wide)
    page.ask("")
    assert "yyy" in page.text(".turn.assistant .text")
    assert page.script("const one = document.getElementById('turns'); return one.scrollWidth - one.clientWidth") == 0
    page.find("prompt").send_keys("z " * 40)
    assert page.script("return document.documentElement.scrollWidth") <= width
    for one in ("prompt", "send"):
        box = page.find(one).rect
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert box["y"] + box["height"] <= PHONE[1]
    page.find("tab-live").click()
    page.until(lambda: page.all(".tile"))
    assert page.script("return document.documentElement.scrollWidth") <= width
    assert page.script("return document.getElementById('live').scrollWidth") <= width


def test_reduced_motion_has_no_animation(echo: EchoServer, page: Page) -> None:
    script = "return getComputedStyle(document.querySelector('.turn.writing .text'), '::after').animationName"
    for value, name in (("reduce", "none"), ("no-preference", "blink")):
        page.prefer("prefers-reduced-motion", value)
        page.open(echo.url)
        page.find("prompt").send_keys("word " * 300, Keys.ENTER)
        page.until(lambda: page.all(".turn.writing"))
        assert page.script(script) == name
        page.press(Keys.ESCAPE)
