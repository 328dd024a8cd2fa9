"""Takes the picture of a real report that the README shows.

    python scripts/screenshot.py runs/demo/report docs/report.png

Needs the `test` extra and a Chromium; nothing is asked for outside this machine.
"""

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

QUIET = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    options = _options()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 3
    take(browser, options.report / options.page, options.picture, options)
    print(options.picture)
    return 0


def take(browser: str, page_file: Path, picture: Path, options: argparse.Namespace) -> None:
    """Opens the page from the disk and photographs its top."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=list(QUIET))
        page = chromium.new_page(
            viewport={"width": options.width, "height": options.height},
            color_scheme=options.scheme,
            device_scale_factor=options.scale,
        )
        page.goto(page_file.resolve().as_uri())
        page.screenshot(path=picture)
        chromium.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path, help="the folder that `trapline report` wrote")
    parser.add_argument("picture", type=Path, help="the PNG file to write")
    parser.add_argument("--page", default="index.html", help="which page of the report")
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1180)
    parser.add_argument("--scale", type=float, default=1.0, help="pixels a CSS pixel")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
