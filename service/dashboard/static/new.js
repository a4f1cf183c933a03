// The page of a new batch: looks at the file before it is uploaded, uploads it with progress, and creates the batch.
"use strict";

const LOOKED_AT = 256 * 1024; // bytes at the beginning of the file
const SHOWN = 3;

function parse(text, isWhole) {
  const lines = text.split("\n");
  if (!isWhole) lines.pop(); // cut off
  const found = { requests: [], problems: [] };
  lines.forEach((line, at) => {
    if (!line.trim()) return;
    try {
      const request = JSON.parse(line);
      const lacks = ["custom_id", "method", "url", "body"].filter((name) => request?.[name] === undefined);
      if (lacks.length) found.problems.push(`Line ${at + 1} has no ${lacks.join(", ")}.`);
      else if (typeof request.body !== "object" || request.body === null || Array.isArray(request.body)) found.problems.push(`The body of line ${at + 1} is no object.`);
      else found.requests.push(request);
    } catch (error) {
      found.problems.push(`Line ${at + 1} is not JSON: ${line.slice(0, 80)}`);
    }
  });
  return found;
}

// `noticed`: by endpoint, the parameters that are not ignored.
function checks(found, isWhole, models, noticed) {
  const said = found.problems.slice(0, SHOWN).map((text) => ["bad", text]);
  const each = (values) => [...new Set(values)];
  const urls = each(found.requests.map((request) => request.url));
  const named = each(found.requests.map((request) => request.body?.model));
  const ids = found.requests.map((request) => request.custom_id);
  if (each(ids).length < ids.length) said.push(["bad", "A custom_id comes twice; each must be unique in the file."]);
  if (urls.length > 1) said.push(["bad", `The lines name several endpoints: ${urls.slice(0, 4).join(", ")}. A batch has one.`]);
  if (urls.length === 1 && !noticed.has(urls[0])) said.push(["bad", `The endpoint ${urls[0]} does not exist here.`]);
  if (named.length > 1) said.push(["bad", `The lines name several models: ${named.slice(0, 4).join(", ")}. A batch has one.`]);
  if (named.length === 1 && !models.includes(named[0])) {
    said.push(["bad", `The model ${named[0]} does not exist here. Available: ${models.join(", ") || "none yet"}.`]);
  }
  const ignored = each(found.requests.flatMap(({ url, body }) => Object.keys(body).filter((name) => noticed.get(url)?.includes(name) === false)));
  const notes = ignored.slice(0, SHOWN).map((name) => ["", `No engine knows the parameter ${name.slice(0, 64)}, so it is ignored.`]);
  if (!found.requests.length && !said.length) {
    said.push(isWhole ? ["bad", "The file has no request."] : ["", "Its first line is too long to look at here. The service checks it."]);
    return said;
  }
  const looked = found.requests.length === 1 ? "The first line looks" : `The first ${found.requests.length.toLocaleString("en")} lines look`;
  if (!said.length) said.push(["good", `${looked} right: ${named[0]}, ${urls[0]}. The service checks every line before anything runs.`]);
  return [...said, ...notes];
}

function show(place, said) {
  place.replaceChildren(...said.map(([kind, text]) => {
    const item = document.createElement("li");
    item.className = kind;
    item.textContent = text;
    return item;
  }));
}

function upload(form, progress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", form.action);
    request.upload.onprogress = ({ loaded, total }) => {
      progress.hidden = false;
      progress.value = loaded / total;
    };
    request.onerror = () => reject(new Error("The upload was cut off. Try again."));
    request.onload = () => {
      const { pathname, searchParams: query } = new URL(request.responseURL);
      if (pathname.endsWith("/sign-in")) reject(new Error("Your session has ended. Sign in again."));
      else if (query.get("file")) resolve(query.get("file"));
      else reject(new Error(query.get("problem") ?? "The upload failed."));
    };
    request.send(new FormData(form)); // with its hidden fields first, as the service needs them
  });
}

document.addEventListener("DOMContentLoaded", () => {
  const root = document.querySelector("[data-new]");
  const [form, create] = [root.querySelector("[data-upload]"), root.querySelector("[data-create]")];
  const [chosen, said, hint] = ["chosen", "checks", "hint"].map((name) => root.querySelector(`[data-${name}]`));
  const [models, noticed] = [JSON.parse(root.dataset.models), new Map(Object.entries(JSON.parse(root.dataset.noticed)))];
  const input = form.querySelector("input[type=file]");
  const drop = root.querySelector(".drop");

  async function look() {
    const [file] = input.files;
    if (!file) return;
    create.elements.file.value = "";
    root.querySelector("[data-lines]").replaceChildren();
    chosen.hidden = false;
    chosen.textContent = `${file.name}, ${(file.size / 1048576).toFixed(1)} MiB`;
    create.elements.name.placeholder = file.name;
    const isTooLarge = file.size > Number(root.dataset.most);
    for (const button of create.querySelectorAll("button")) button.disabled = isTooLarge;
    hint.textContent = "Nothing runs until the whole file has been uploaded and checked; errors are listed by line.";
    if (isTooLarge) {
      show(said, [["bad", `The file is larger than ${(Number(root.dataset.most) / 1048576).toFixed(0)} MiB. Split it into several batches.`]]);
      return;
    }
    const head = new Uint8Array(await file.slice(0, LOOKED_AT).arrayBuffer());
    if (head[0] === 0x1f || head[0] === 0x28) { // gzip or zstd
      show(said, [["good", "The file is packed; the service unpacks and checks it."]]);
      return;
    }
    const found = parse(new TextDecoder().decode(head), file.size <= LOOKED_AT);
    const url = found.requests[0]?.url;
    if (noticed.has(url)) create.elements.endpoint.value = url;
    show(said, checks(found, file.size <= LOOKED_AT, models, noticed));
    const lines = document.createElement("pre");
    lines.tabIndex = 0;
    lines.textContent = found.requests.slice(0, SHOWN).map((each) => JSON.stringify(each).slice(0, 400)).join("\n");
    root.querySelector("[data-lines]").replaceChildren(...(found.requests.length ? [lines] : []));
  }

  input.addEventListener("change", look);
  for (const kind of ["dragover", "dragleave", "drop"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", kind === "dragover");
      if (kind === "drop" && event.dataTransfer.files.length) {
        input.files = event.dataTransfer.files;
        look();
      }
    });
  }
  create.addEventListener("submit", async (event) => {
    if (create.elements.file.value) return;
    event.preventDefault();
    const held = event.submitter?.name === "hold";
    const fields = [input, ...create.querySelectorAll("button")];
    const sent = upload(form, root.querySelector("[data-sent]")); // before its field is disabled, and so left out
    for (const field of fields) field.disabled = true;
    try {
      create.elements.file.value = await sent;
    } catch (error) {
      show(said, [["bad", error.message]]);
      for (const field of fields) field.disabled = false;
      return;
    }
    if (held) {
      const wish = Object.assign(document.createElement("input"), { type: "hidden", name: "hold", value: "true" });
      create.append(wish);
    }
    create.submit();
  });
  look(); // a browser that comes back to this page may still have the file
});
