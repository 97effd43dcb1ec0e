// Asks the search of a built site, as its pages do: node docs/site/search.mjs site
// A query finds its page first; the other pages that it finds below are guides before records.
import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const FIRST = {
  "learning rate": "docs/start.html",
  MaskedNode: "docs/faq.html",
  "'MaskedNode' object has no attribute 'dtype'": "docs/faq.html",
  FSDP: "docs/distribution.html",
  Muon: "methods/muon.html",
  NaN: "docs/troubleshooting.html",
  "weight decay": "docs/start.html",
};
const RECORD = /^(benchmarks|clients|examples|optimizers|tests|transforms)\//;

const site = process.argv[2] ?? "site";
const folder = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(folder).find((name) => /^search.*\.js$/.test(name));
const answers = [];
let ask;
const self = {
  console,
  addEventListener: (_, listener) => (ask = listener),
  postMessage: (data) => answers.push(data),
};
self.self = self;
vm.runInNewContext(fs.readFileSync(path.join(folder, worker), "utf8"), self);

async function answer(type, data) {
  await ask({ data: { type, data } });
  return answers.pop().data;
}

const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
await answer(0, { ...index, options: {} });
let wrong = 0;
for (const [query, page] of Object.entries(FIRST)) {
  const { items } = await answer(2, query);
  const found = items.map((item) => item[0].location.split("#")[0]);
  const record = found.findIndex((x) => RECORD.test(x));
  const behind = found.slice(record).filter((x) => record >= 0 && !RECORD.test(x));
  if (found[0] !== page || behind.length) {
    wrong += 1;
    console.error(`${query}: expected ${page} first, found ${found.slice(0, 5).join(", ")}`);
    if (behind.length) console.error(`  behind a record: ${behind.slice(0, 5).join(", ")}`);
  }
}
process.exit(wrong ? 1 : 0);
