// The parts of Observable Plot that the report's pages use; esbuild leaves the others out.
export {areaY, barX, dot, line, plot, pointer, ruleY, text, tickX, tip} from "@observablehq/plot";
