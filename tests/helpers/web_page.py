"""The server's page in a browser, as tests use it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

Value = TypeVar("Value")

SECONDS = 60.0
"""How long a condition may take on a machine with other work."""

ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-sync")
QUIET = ("--no-first-run", "--disable-background-networking", "--disable-component-update")
WIDE, TALL = 1280, 860


@dataclass(frozen=True)
class Sent:
    """A request that the page sent. `body`: of a POST."""

    url: str
    method: str
    headers: dict[str, str]
    body: dict[str, Any] | None

    @property
    def origin(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def path(self) -> str:
        return urlsplit(self.url).path


class Page:
    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.origins: set[str] = set()
        self._sent: list[Sent] = []
        self.size(WIDE, TALL)

    def open(self, url: str, path: str = "/") -> None:
        self.origins.add(url)
        self.driver.get("about:blank")  # otherwise another fragment would not load the page again
        self.driver.get(url + path)
        self.until(lambda: self.shown("tabs") or self.shown("locked") or self.shown("trouble"))

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, feature: str, value: str) -> None:
        """Sets a preference of the user, such as `prefers-color-scheme`."""
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": feature, "value": value}]})

    def find(self, id_: str) -> WebElement:
        return self.driver.find_element(By.ID, id_)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def shown(self, id_: str) -> bool:
        return self.find(id_).is_displayed()

    def text(self, selector: str) -> str:
        """The text of the last element that matches; empty if none does."""
        script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.innerText ?? ''"
        return str(self.script(script, selector))

    def script(self, text: str, *arguments: Any) -> Any:
        return self.driver.execute_script(text, *arguments)

    def until(self, condition: Callable[[], Value], seconds: float = SECONDS) -> Value:
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"still not so; the page shows: {self.text('body')[:2000]}"
            time.sleep(0.05)
        return value

    def press(self, *keys: str) -> None:
        """Presses keys where the focus is."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def press_with_shift(self, key: str) -> None:
        ActionChains(self.driver).key_down(Keys.SHIFT).send_keys(key).key_up(Keys.SHIFT).perform()

    @property
    def focused(self) -> WebElement:
        return self.driver.switch_to.active_element

    def set(self, id_: str, value: str) -> None:
        field = self.find(id_)
        field.clear()
        field.send_keys(value)

    def ask(self, text: str, *, whole: bool = True) -> str:
        """Sends a message; returns the reply, when it is complete, or what there is of it."""
        self.find("prompt").send_keys(text, Keys.ENTER)
        self.until(lambda: self.shown("stop") or self.shown("send"))
        if whole:
            self.until(lambda: self.shown("send"))
        return self.text(".turn.assistant .text")

    def save(self, file: Path) -> None:
        time.sleep(0.3)  # colours change slowly
        assert self.driver.save_screenshot(str(file))

    def requests(self) -> list[Sent]:
        """All requests of the page so far."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] != "Network.requestWillBeSent":
                continue
            request = message["params"]["request"]
            if request["url"].startswith(("http:", "https:", "ws:", "wss:")):
                body = json.loads(request["postData"]) if "postData" in request else None
                self._sent.append(Sent(request["url"], request["method"], request["headers"], body))
        return self._sent

    def chats(self) -> list[dict[str, Any]]:
        """The bodies of all chat requests so far."""
        return [one.body for one in self.requests() if one.path.endswith("/v1/chat/completions") and one.body]

    def errors(self) -> list[str]:
        """What the browser reports, such as exceptions and breaches of the Content Security Policy, without requests
        that a server refused."""
        told = (entry["message"] for entry in self.driver.get_log("browser"))
        return [one for one in told if "Failed to load resource" not in one]


@contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in (*ARGUMENTS, *QUIET, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    try:
        yield Page(driver)
    finally:
        driver.quit()
