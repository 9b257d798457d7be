// What is wrong with how a page looks, as far as it can be computed: run in the page, returns sentences.
() => {
  const found = [];
  const visible = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const aside = ".unseen, .skip, .time, .marks, option, #announcer";
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const element = node.parentElement;
    if (!node.data.trim() || !visible(element) || element.closest(aside)) continue;
    texts.push({ node, element, text: node.data.trim().slice(0, 40) });
  }

  const rgba = (color) =>
    color
      .match(/[\d.]+/g)
      .map(Number)
      .concat(1)
      .slice(0, 4);
  const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
  const light = ([r, g, b]) =>
    [r, g, b]
      .map((x) => x / 255)
      .map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
      .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
  };
  for (const { element, text } of texts) {
    const ground = behind(element);
    const [a, b] = [light(over(rgba(getComputedStyle(element).color), ground)), light(ground)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`contrast ${ratio.toFixed(2)}: ${text}`);
  }

  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) found.push(`the page is ${root.scrollWidth - innerWidth} px too wide`);
  const boxes = texts.map(({ node, element, text }) => {
    const range = document.createRange();
    range.selectNodeContents(node);
    return { element, text, rects: [...range.getClientRects()] };
  });
  for (const { element, text, rects } of boxes) {
    if (element.closest("[title]") || element.closest(".scroll, pre, .list")) continue; // can be scrolled, or is told
    for (let at = element; at && at !== document.body; at = at.parentElement) {
      if (getComputedStyle(at).overflowX === "visible") continue;
      const hole = at.getBoundingClientRect();
      if (rects.some((r) => r.right > hole.right + 1 || r.left < hole.left - 1)) found.push(`cut: ${text}`);
    }
  }
  const flat = boxes
    .filter(({ element }) => !element.closest(".scroll, .list, figcaption"))
    .flatMap(({ element, text, rects }) => rects.map((r) => ({ element, text, r })));
  flat.forEach((one, i) => {
    for (const other of flat.slice(i + 1)) {
      const wide = Math.min(one.r.right, other.r.right) - Math.max(one.r.left, other.r.left);
      const high = Math.min(one.r.bottom, other.r.bottom) - Math.max(one.r.top, other.r.top);
      if (wide > 2 && high > 4 && one.element !== other.element) found.push(`overlap: ${one.text} / ${other.text}`);
    }
  });
  return found;
};
