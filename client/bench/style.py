"""The look of a report page. Colours are variables, one set for light and one for dark."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #ffffff; --text: #1d2129; --quiet: #667080; --rule: #e3e6ea;
  --pending: #c9ced6; --prefilling: #e59f1c; --decoding: #3772d6; --failed: #cf4b43;
  --stored: #2f8f6b; --empty: #bcdccf;
  --c0: #3772d6; --c1: #d9730d; --c2: #2f8f6b; --c3: #8a4fbf; --c4: #b8336a; --c5: #667080;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171c; --card: #1b1f26; --text: #e4e7ec; --quiet: #949eae; --rule: #2d333d;
    --pending: #4a5260; --prefilling: #eab04a; --decoding: #6b9cf2; --failed: #ee7a72;
    --stored: #4fb98f; --empty: #2b5345;
    --c0: #6b9cf2; --c1: #f0994a; --c2: #4fb98f; --c3: #b98ae6; --c4: #ec79a4; --c5: #949eae;
  }
}
* { box-sizing: border-box; }
body { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 36px 0 12px; display: flex; flex-wrap: wrap; gap: 2px 10px;
  align-items: baseline; }
.subtitle { color: var(--quiet); margin: 2px 0 18px; font-size: 17px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0;
  font-size: 14px; overflow-wrap: anywhere; }
dt { color: var(--quiet); } dd { margin: 0; }
details { margin-top: 8px; font-size: 14px; } summary { color: var(--quiet); cursor: pointer; }
details dl { margin-top: 8px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin-top: 22px; }
.tiles div, figure { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; }
.tiles div { padding: 12px 14px; color: var(--quiet); font-size: 13px; }
.tiles b { display: block; color: var(--text); font-size: 23px; font-weight: 600;
  font-variant-numeric: tabular-nums; }
figure { margin: 0 0 14px; padding: 12px 14px 8px; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 10px; align-items: baseline;
  margin-bottom: 6px; }
small { color: var(--quiet); font-size: 13px; font-weight: 400; }
.legend { margin-left: auto; display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: 13px;
  color: var(--quiet); font-weight: 400; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 6px; background: var(--c); }
.legend i.waiting { height: 2px; border-radius: 0; vertical-align: 4px; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; }
.tick { fill: var(--quiet); } .label { fill: var(--text); font-size: 13px; }
.grid { stroke: var(--rule); } .axis { stroke: var(--quiet); stroke-opacity: .5; }
.pending { --c: var(--pending); } .prefilling { --c: var(--prefilling); }
.decoding { --c: var(--decoding); } .failed { --c: var(--failed); }
.stored { --c: var(--stored); } .empty { --c: var(--empty); } .waiting { --c: var(--text); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); }
.c3 { --c: var(--c3); } .c4 { --c: var(--c4); } .c5 { --c: var(--c5); }
svg path, svg rect { fill: var(--c); }
svg path.curve, svg path.waiting { fill: none; stroke: var(--c); stroke-width: 2; }
svg path.waiting { stroke-width: 1.2; stroke-opacity: .75; }
.request:hover rect { opacity: .7; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 14px; }
.wider { grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); }
.beside figure { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 400; color: var(--quiet); padding: 3px 24px 3px 0; }
td { text-align: right; padding: 3px 0 3px 24px; white-space: nowrap; }
tr:first-child th { text-align: right; color: var(--text); font-weight: 600;
  padding: 3px 0 3px 24px; }
tr + tr { border-top: 1px solid var(--rule); }
"""
