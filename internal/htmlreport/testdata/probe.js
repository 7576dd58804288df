// Runs behind the page's own script in TestBrowserDrawsThePage: opens all that is folded, measures
// the contrast of each text that is seen, and walks through each figure by its arrow keys.
"use strict";
(() => {
	const root = document.documentElement;
	const found = {texts: 0, faint: [], mute: [], wide: [], small: []};
	for (const d of document.querySelectorAll("details")) {
		d.open = true;
	}
	const parts = (text) => text.match(/[\d.]+/g).map(Number);
	const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
		.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
		.reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
	const behind = (e) => {
		for (; e; e = e.parentElement) {
			const c = parts(getComputedStyle(e).backgroundColor);
			if (c.length < 4 || c[3] === 1) {
				return c;
			}
		}
		return root.dataset.scheme === "dark" ? [0, 0, 0] : [255, 255, 255];
	};
	for (const e of document.body.querySelectorAll("*")) {
		const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
		if (!own || /^(SCRIPT|STYLE|TITLE)$/i.test(e.tagName)) {
			continue;
		}
		const style = getComputedStyle(e);
		const ink = parts(e.closest("svg") ? style.fill : style.color);
		const a = light(ink), b = light(behind(e));
		found.texts++;
		if ((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5) {
			found.faint.push(`${e.tagName} ${e.textContent.slice(0, 40)}`);
		}
		if (parseFloat(style.fontSize) < 10) {
			found.small.push(`${e.tagName} ${style.fontSize}`);
		}
	}
	for (const svg of document.querySelectorAll("figure .plot > svg")) {
		const title = svg.closest("figure").querySelector("figcaption").textContent;
		svg.focus();
		for (const key of ["ArrowRight", "End"]) {
			svg.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
		}
		const tip = svg.querySelector("[aria-label=tip]");
		if (document.activeElement !== svg || !svg.parentElement.querySelector(".told").textContent ||
			!tip || !tip.textContent) {
			found.mute.push(title);
		}
		if (svg.getBoundingClientRect().right > root.clientWidth + 1) {
			found.wide.push(title);
		}
		svg.blur();
	}
	root.dataset.probe = JSON.stringify(found);
	root.dataset.unfolded = String(Math.max(0, root.scrollWidth - root.clientWidth));
})();
