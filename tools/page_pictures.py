#!/usr/bin/env python3
"""The pictures of the web page in README: docs/page-light.webp and docs/page-dark.webp, 1280 x 800, without loss.

    page_pictures.py [--kt build/bin/kt] [--out docs] [--seed 1] [--threads 2]

Starts `kt run demo`, asks for two stories in Chromium and takes both pictures when the second is told: a light screen,
then a dark one. What is written hangs on the seed; speeds are those of this machine. Needs Chromium with its
driver, and selenium and Pillow in this Python.
"""
import argparse
import base64
import io
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage",
         "--no-proxy-server", "--force-color-profile=srgb", "--hide-scrollbars")
SIZE = 1280, 800
QUESTIONS = ("Tell me a story about a robot who wants to bake",
             "Tell me a story about a girl who finds a key in the snow")
PATIENCE = 300


def wait_for(what, name, seconds=PATIENCE):
    """The first true value of what()."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := what():
            return value
        time.sleep(0.02)
    sys.exit(f"{name}: not within {seconds} s")


class Demo:
    """`kt run demo` on a free port, while it is entered."""

    def __init__(self, kt, threads):
        self.log = tempfile.NamedTemporaryFile(prefix="kt-run-", suffix=".log")
        self.process = subprocess.Popen([kt, "run", "demo", "--cpu-threads", str(threads), "--port", "0"], cwd=ROOT,
                                        stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)

    def ready(self):
        said = pathlib.Path(self.log.name).read_text(errors="replace")
        if self.process.poll() is not None:
            sys.exit(f"kt run ended with {self.process.returncode}: {said[-2000:]}")
        return re.search(r"ready: (http://[\d.:]+)(?=\s)", said)

    def __enter__(self):
        try:
            return wait_for(self.ready, "kt run is ready")[1]
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


def screens(browser, url, seed):
    """(light, dark): PNG files of the second answer, which has ended: nothing depends on how fast it came."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    run = browser.execute_script

    def emulate(scheme):
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def answering():
        return run("return document.body.classList.contains('answering')")

    def ask(question):
        browser.find_element(By.CSS_SELECTOR, "#prompt").send_keys(question, Keys.ENTER)
        wait_for(answering, "an answer begins")

    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False})
    emulate("light")
    browser.get(url + "/")
    run("localStorage.clear(); localStorage.setItem('kt.settings', JSON.stringify({seed: arguments[0]}))", str(seed))
    browser.refresh()
    wait_for(lambda: run("return document.body?.classList.contains('ready')"), "the page is ready")
    ask(QUESTIONS[0])
    wait_for(lambda: not answering(), "the first answer ends")
    ask(QUESTIONS[1])
    wait_for(lambda: not answering(), "the second answer ends")
    taken = []
    for scheme in ("light", "dark"):
        emulate(scheme)
        time.sleep(0.4)  # until colours have changed: some take 0.2 s
        taken.append(base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]))
    return taken


def save(png, path):
    from PIL import Image
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    assert picture.size == SIZE
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, "WEBP", lossless=True, quality=100, method=6)
    print(f"{path}: {path.stat().st_size} bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kt", default=ROOT / "build/bin/kt", help="the program")
    parser.add_argument("--out", default=ROOT / "docs", type=pathlib.Path, help="folder")
    parser.add_argument("--seed", default=1, type=int)
    parser.add_argument("--threads", default=2, type=int)
    arguments = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if not (chromium and driver):
        sys.exit("Chromium or its driver is not there: apt-get install chromium chromium-driver")
    try:
        import PIL  # noqa: F401
        from selenium import webdriver
    except ImportError as e:
        sys.exit(f"{e}: pip install selenium pillow")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    with (Demo(arguments.kt, arguments.threads) as url,
          tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder):
        for flag in (*FLAGS, f"--user-data-dir={folder}"):
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            light, dark = screens(browser, url, arguments.seed)
        finally:
            browser.quit()
    save(light, arguments.out / "page-light.webp")
    save(dark, arguments.out / "page-dark.webp")


if __name__ == "__main__":
    main()
