// Packs the parts of Observable Plot that internal/htmlreport uses into one script, and the licences of
// all that is in it into one file: node build.mjs DIR, after npm ci.
import {readFileSync, readdirSync, writeFileSync} from "node:fs";
import {join} from "node:path";
import {build} from "esbuild";

const dir = process.argv[2];
if (!dir) {
	throw new Error("name the folder to write to");
}
const result = await build({entryPoints: ["entry.js"], bundle: true, minify: true, format: "iife",
	globalName: "Plot", target: "es2020", legalComments: "none", metafile: true, write: false});
const packages = new Set();
for (const [file, input] of Object.entries(result.metafile.outputs["<stdout>"]?.inputs ??
	Object.values(result.metafile.outputs)[0].inputs)) {
	const found = file.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/);
	if (found && input.bytesInOutput > 0) {
		packages.add(found[1]);
	}
}
let licences = "";
const names = [];
for (const name of [...packages].sort()) {
	const at = join("node_modules", name);
	const {version} = JSON.parse(readFileSync(join(at, "package.json"), "utf8"));
	const file = readdirSync(at).find((f) => /^licen[cs]e(\.|$)/i.test(f));
	if (!file) {
		throw new Error(`${name} ${version} has no licence in its package`);
	}
	names.push(`${name} ${version}`);
	licences += `${name} ${version}\n\n${readFileSync(join(at, file), "utf8").trim()}\n\n`;
}
const head = "// Made by tools/plotbundle; do not edit. Licences: LICENSES.txt.\n";
const script = result.outputFiles[0].text.replaceAll("</script", "<\\/script");
writeFileSync(join(dir, "plot.js"), head + script);
writeFileSync(join(dir, "LICENSES.txt"), licences.trimEnd() + "\n");
console.log(`${names.length} packages, ${script.length} characters: ${names.join(", ")}`);
