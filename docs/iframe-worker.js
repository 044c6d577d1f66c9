// Search from the file system: a browser runs no worker of a page that was opened from disk, so the
// search runs in a hidden frame that looks like a worker to the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      this.inside = inside;
      this.loaded = new Promise((resolve) => { this.resolve = resolve; });
      window.addEventListener("message", (event) => {
        if (event.source !== inside) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      const page = inside.document;
      page.open();
      page.write("<html><body></body></html>");
      page.close();
      // to the page, as a worker's own postMessage does
      inside.postMessage = (data) => {
        window.dispatchEvent(new MessageEvent("message", { data, source: inside }));
      };
      inside.importScripts = (...urls) => Promise.all(urls.map((one) => this.load(one)));
      this.load(url).then(() => this.resolve());
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        this.inside.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => {
        this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
      });
    }

    terminate() {}
  };
}
