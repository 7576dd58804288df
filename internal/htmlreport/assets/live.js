// Follows a run that is under way: asks for what is new, and keeps what is unfolded, the focus and the
// place on the page.
"use strict";
(() => {
	const page = document.getElementById("page");
	const every = 1000;
	let lines = -1;

	// A name that an element has again on the page that comes.
	const name = (e) => `${e.closest("figure")?.querySelector("figcaption").textContent ?? ""} ` +
		`${e.tagName} ${e.getAttribute("aria-label") ?? e.textContent}`;
	const among = (selector, is) => [...page.querySelectorAll(selector)].find((e) => name(e) === is);

	function replace(text, drawn) {
		const folds = new Map([...page.querySelectorAll("summary")]
			.map((s) => [name(s), s.parentElement.open]));
		const focus = page.contains(document.activeElement) && name(document.activeElement);
		const y = window.scrollY;
		page.innerHTML = text;
		for (const s of page.querySelectorAll("summary")) {
			s.parentElement.open = folds.get(name(s)) ?? s.parentElement.open;
		}
		figures.splice(0, figures.length, ...drawn ?? []);
		window.dispatchEvent(new Event("figures"));
		window.scrollTo(0, y);
		if (focus) {
			among("a, summary, [tabindex]", focus)?.focus({preventScroll: true});
		}
	}

	async function ask() {
		let ended = false;
		try {
			const answer = await fetch(`live?lines=${lines}`);
			if (!answer.ok) {
				throw new Error(await answer.text());
			}
			const news = await answer.json();
			if (news.page) {
				replace(news.page, news.figures);
			}
			document.getElementById("now").innerHTML = news.now;
			({lines, ended} = news);
		} catch (e) {
			document.getElementById("state").textContent =
				`The run does not answer (${e.message}); this is what it last said.`;
		}
		if (!ended) {
			setTimeout(ask, every);
		}
	}
	setTimeout(ask, every);
})();
