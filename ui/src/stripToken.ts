// The server has kept the token of the printed address in a cookie, so copied links need not hold it. A number is the
// place of the chosen token of a model, which is in the address too. This module is imported first, because the router
// reads the address when it is made.
const address = new URL(window.location.href);
const token = address.searchParams.get("token");
if (token !== null && !/^\d+$/.test(token)) {
  address.searchParams.delete("token");
  window.history.replaceState(null, "", address);
}
